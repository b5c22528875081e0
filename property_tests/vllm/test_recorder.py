"""The recorder says what vLLM's engine process does, and whatever happens to it, vLLM goes on."""

from __future__ import annotations

import gc
import itertools
import random
import resource
import weakref

import pytest

from harness.conformance import explain
from harness.events import Called, Closed, Finished, Opened, Returned
from harness.log import read_log
from harness.operations import from_data
from harness.trial import review


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def async_scheduling(request):
    return request.param


@pytest.fixture
def make_core(needs_vllm, tmp_path, monkeypatch):
    from .core_process import CoreProcess

    def make(*, megabytes=1.0, **shape):
        monkeypatch.setenv("CAESURA_LOG", str(tmp_path))
        monkeypatch.setenv("CAESURA_LOG_MB", str(megabytes))
        return CoreProcess(**shape)

    return make


@pytest.fixture
def warnings(monkeypatch):
    """What the recorder says in vLLM's log."""
    from harness.backends.vllm import recorder

    said = []
    monkeypatch.setattr(recorder.logger, "warning", lambda text, *args: said.append(text % args if args else text))
    return said


def logs(folder):
    return [read_log(run) for run in sorted(folder.iterdir())]


def calls(log):
    return [from_data(entry.event.operation) for entry in log.entries if isinstance(entry.event, Called)]


def ask_something(core, ids, draw):
    """One message, as any client may send it at any time."""
    kind = draw.random()
    if kind < 0.4:
        ids.append(f"r{len(ids)}-1")
        core.submit(ids[-1], draw.randrange(1, 25), draw.randrange(1, 12))
    elif kind < 0.5 and ids:
        core.abort(*draw.sample(ids, min(len(ids), draw.choice([1, 1, 2, 3]))))
    elif kind < 0.65:
        core.call("pause_scheduler", draw.choice(["keep", "wait", "abort"]), draw.random() < 0.5)
    elif kind < 0.8:
        core.call("resume_scheduler")
    elif kind < 0.83:
        core.call("reset_prefix_cache")
    elif kind < 0.86:
        core.call("is_scheduler_paused")
    else:
        core.weights("start_weight_update")
        core.weights("update_weights", update_info={})
        core.weights("finish_weight_update")


def test_the_model_explains_whatever_the_engine_process_is_asked(make_core, tmp_path, async_scheduling):
    core = make_core(async_scheduling=async_scheduling)
    draw, ids = random.Random(0), []
    for _ in range(300):
        for _ in range(draw.choice([0, 0, 1, 2, 3, 4])):
            ask_something(core, ids, draw)
        core.turn()
    core.call("resume_scheduler")
    core.drain()
    core.shutdown()
    (log,) = logs(tmp_path)
    assert log.closed
    assert explain(log.entries).mismatch is None
    assert len(ids) > 50


def test_a_wait_that_keep_froze_is_answered_after_calls_that_come_before_the_loop_looks(make_core, tmp_path):
    core = make_core()
    core.submit("r1-1", max_tokens=8)
    core.turn()
    core.call("pause_scheduler", "wait", True)
    core.turn()
    core.call("pause_scheduler", "keep", False)
    core.call("is_scheduler_paused")
    core.drain()
    core.shutdown()
    (log,) = logs(tmp_path)
    returned = [entry.event.op for entry in log.entries if isinstance(entry.event, Returned)]
    assert returned == [0, 2, 3, 1], "submit, keep, is_paused, and only then wait"
    assert explain(log.entries).mismatch is None


def test_a_call_is_answered_in_the_log_as_it_was(make_core, tmp_path):
    core = make_core()
    core.weights("update_weights", update_info={})
    core.weights("start_weight_update")
    core.weights("start_weight_update")
    core.drain()
    core.shutdown()
    (log,) = logs(tmp_path)
    returned = [entry.event for entry in log.entries if isinstance(entry.event, Returned)]
    assert [event.error and event.error.code for event in returned] == ["conflict", None, "conflict"]


def test_weights_written_by_a_method_that_the_user_names_are_seen(make_core, tmp_path, monkeypatch):
    monkeypatch.setenv("CAESURA_WEIGHT_CALLS", "update_from_ipc,load_delta")
    core = make_core()
    core.weights("load_delta")
    core.drain()
    core.shutdown()
    (log,) = logs(tmp_path)
    assert [operation.verb for operation in calls(log)] == ["swap_weights"]


def test_a_log_that_is_full_is_followed_by_another_that_stands_for_itself(make_core, tmp_path, async_scheduling):
    core = make_core(megabytes=0.02, async_scheduling=async_scheduling)
    for number in itertools.count():
        core.submit(f"r{number}-1", max_tokens=20)
        core.submit(f"s{number}-1", max_tokens=20)
        core.turn()
        core.call("pause_scheduler", "wait", True)
        core.drain()
        core.call("set_weight_version", f"v{number}")
        core.call("resume_scheduler")
        if len(list(tmp_path.iterdir())) == 4:
            break
    for log in logs(tmp_path)[:3]:
        trial = review(log, None)
        assert trial.verdict.status == "holds", trial.verdict.reasons


def test_without_a_moment_for_another_log_recording_ends_at_four_times_the_bound(make_core, tmp_path, warnings):
    core = make_core(megabytes=0.005)
    core.submit("r0-1", prompt=9, max_tokens=30)
    for number in range(1, 200):
        core.submit(f"r{number}-1", prompt=9, max_tokens=30)
        core.turn()
    core.drain()
    (said,) = warnings
    assert "there was no moment at which nothing was live or cached" in said
    assert sum(file.stat().st_size for file in tmp_path.glob("*/*")) < 4.5 * 0.005 * 2**20


def test_a_full_disk_ends_the_recording_and_not_the_serving(make_core, tmp_path, warnings, async_scheduling):
    core = make_core(async_scheduling=async_scheduling)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    (file,) = tmp_path.glob("*/*")
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.stat().st_size + 1_500, hard))
    try:
        for number in range(8):
            core.submit(f"r{number}-1")
            core.turn()
        core.drain()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not core.scheduler.requests
    assert len(warnings) == 1 and warnings[0].startswith("Caesura stopped recording; serving goes on."), warnings
    assert read_log(file).entries, "what was written before can be read"


@pytest.mark.parametrize("method", ["_schedule", "_update_from_output", "_admit", "_free_request", "_cache_full_blocks"])
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_fault_of_the_recorder_ends_the_recording_and_not_the_serving(make_core, warnings, monkeypatch, method, moment):
    from harness.backends.vllm.transitions import Transitions

    def breaking(self, original):
        def watched(*args, **kwargs):
            if moment == "after":
                original(*args, **kwargs)
            raise ZeroDivisionError(method)

        return watched

    monkeypatch.setattr(Transitions, method, breaking)
    core = make_core()
    core.submit("r1-1", prompt=9, max_tokens=8)
    core.submit("r2-1", prompt=9, max_tokens=8)
    core.drain()
    outputs = [output for _, message in list(core.output_queue.queue) for output in message.outputs]
    assert sum(len(output.new_token_ids) for output in outputs) == 16, "vLLM was called once for each of its calls"
    assert warnings == [f"Caesura stopped recording; serving goes on. ZeroDivisionError: {method}"]


def test_a_folder_that_cannot_be_written_is_no_reason_not_to_serve(make_core, tmp_path, warnings):
    (tmp_path / "vllm-taken-001").write_text("a file where the folder should be")
    core = make_core(instance_id="taken")
    core.submit("r1-1")
    core.drain()
    assert not core.scheduler.requests
    assert len(warnings) == 1 and "cannot write a log" in warnings[0]


def test_a_request_of_which_no_log_can_tell_ends_the_recording(make_core, tmp_path, warnings):
    core = make_core()
    core.submit("r1-1", prompt_logprobs=1)
    core.turn()
    assert warnings == [
        "Caesura stopped recording; serving goes on. Request r1-1 asks for log probabilities of its prompt, which no log can tell of yet."
    ]
    (log,) = logs(tmp_path)
    assert [type(entry.event) for entry in log.entries] == [Opened]


@pytest.mark.parametrize(("kind", "other"), [("Recorder", True), ("AsyncRecorder", False)])
def test_the_recorder_for_the_other_kind_of_scheduling_says_which_to_take(make_core, kind, other):
    from harness.backends.vllm.recorder import WrongScheduler

    right = "AsyncRecorder" if other else "Recorder"
    with pytest.raises(WrongScheduler, match=rf"--scheduler-cls\s+harness\.backends\.vllm\.{right}"):
        make_core(async_scheduling=other, scheduler_cls=f"harness.backends.vllm.{kind}")


def shifted(outputs):
    outputs[0].new_token_ids = [outputs[0].new_token_ids[0] + 1]


def doubled(outputs):
    outputs[0].new_token_ids = outputs[0].new_token_ids * 2


def swapped(outputs):
    first, second = outputs[:2]
    first.new_token_ids, second.new_token_ids = second.new_token_ids, first.new_token_ids


def dropped(outputs):
    del outputs[0]


@pytest.mark.parametrize("fault", [shifted, doubled, swapped, dropped])
def test_a_fault_of_vllm_in_a_steady_step_is_in_the_log(fault, make_core, tmp_path, monkeypatch, async_scheduling):
    """Steady steps are told in columns, which must hide nothing."""
    from vllm.v1.core.sched.scheduler import Scheduler

    update, made = Scheduler.update_from_output, itertools.count()

    def faulty(self, *args, **kwargs):
        by_client = update(self, *args, **kwargs)
        if next(made) == 6:
            fault(by_client[0].outputs)
        return by_client

    monkeypatch.setattr(Scheduler, "update_from_output", faulty)
    core = make_core(async_scheduling=async_scheduling)
    core.submit("r1-1", prompt=9, max_tokens=12)
    core.submit("r2-1", prompt=5, max_tokens=12)
    core.drain()
    core.shutdown()
    (log,) = logs(tmp_path)
    verdict = review(log, None).verdict
    assert "violated" in {judgement.status for judgement in verdict.judgements if judgement.invariant != "version-attribution"}
    assert verdict.explanation is not None and verdict.explanation.mismatch is not None


def test_a_label_set_between_steady_steps_begins_a_span_there(make_core, tmp_path, async_scheduling):
    core = make_core(async_scheduling=async_scheduling)
    core.submit("r1-1", prompt=9, max_tokens=12)
    for _ in range(5):
        core.turn()
    core.call("pause_scheduler", "keep", False)
    core.turn()
    core.turn()
    core.call("set_weight_version", "v2")
    core.call("resume_scheduler")
    core.drain()
    core.shutdown()
    (log,) = logs(tmp_path)
    (finished,) = [entry.event for entry in log.entries if isinstance(entry.event, Finished)]
    assert [span.version for span in finished.spans] == ["default", "v2"]
    assert finished.spans[0].end == finished.spans[1].start and finished.spans[1].end == 12
    assert review(log, None).verdict.explanation.mismatch is None


def test_nothing_that_vllm_gives_back_is_kept(make_core, monkeypatch):
    """A caller's weights would stay in memory until the next call."""
    core = make_core()

    class Weights:
        pass

    monkeypatch.setattr(core.model_executor, "collective_rpc", lambda *args, **kwargs: Weights())
    given = weakref.ref(core.collective_rpc("get_weights"))
    gc.collect()
    assert given() is None


def test_a_step_that_raises_is_the_last_thing_in_the_log(make_core, tmp_path, monkeypatch):
    core = make_core()
    core.submit("r1-1")
    core.turn()

    def breaks(*_, **__):
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(core.model_executor, "execute_model", breaks)
    with pytest.raises(RuntimeError, match="the device is gone"):
        core.turn()
    (log,) = logs(tmp_path)
    closed = log.entries[-1].event
    assert isinstance(closed, Closed) and closed.why == "failed"
    assert explain(log.entries).mismatch is None
