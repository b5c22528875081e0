"""A step is launched while the one before it is in flight: what that changes, and what it must not change."""

from __future__ import annotations

import pytest
import torch

from engine import EngineCore, NotFinite, SamplingParams

PROMPT = list(range(20, 26))
SEEDED = {"temperature": 1.2, "top_p": 0.95, "seed": 11, "logprobs": 2}


def submit(engine: EngineCore, *request_ids: str, **params) -> None:
    for index, request_id in enumerate(request_ids):
        engine.submit(request_id, [index, *PROMPT], SamplingParams(**{"max_tokens": 8, "ignore_eos": True, **params}))


def steps(engine: EngineCore, count: int) -> None:
    for _ in range(count):
        engine.step()


def outputs(engine: EngineCore) -> list[tuple[str, int, int, str | None]]:
    return [(one.request_id, one.first, len(one.token_ids), one.finish_reason) for one in engine.take_outputs()]


@pytest.fixture
def engine(make_engine, recorder) -> EngineCore:
    return make_engine(async_scheduling=True, observer=recorder)


def test_timeline_of_a_request_each_step_launched_before_the_one_ahead_has_landed(engine, recorder):
    submit(engine, "r", max_tokens=3)
    while engine.has_work():
        engine.step()
    assert recorder.take() == [
        "accepted r parked=False",
        "allocated r [0 1] evicted=[]",
        "stored r 0:0",
        "admitted r life=1 num_computed_tokens=0",
        "launched 1 [[r 0 7]]",
        "launched 2 [[r 7 1]]",
        "landed 1 r",
        "allocated r [2] evicted=[]",
        "stored r 1:1",
        "launched 3 [[r 8 1]]",
        "landed 2 r",
        "landed 3 r",
        "finished r reason=length num_prompt_tokens=7 num_output_tokens=3 spans=[[default 0 3]]",
        "freed r head=[2] tail=[1 0]",
    ]


@pytest.mark.parametrize("shape", [{}, {"num_blocks": 13}, {"max_num_batched_tokens": 5}, {"prefix_caching": False}], ids=str)
@pytest.mark.parametrize("params", [{}, SEEDED], ids=["greedy", "seeded"])
def test_tokens_and_logprobs_are_those_of_an_engine_that_waits_for_each_step(make_engine, shape, params):
    def told(**how):
        engine, found = make_engine(**shape, **how), {}
        submit(engine, "a", "b", "c", "d", max_tokens=14, **params)
        while engine.has_work():
            engine.step()
            for output in engine.take_outputs():
                tokens, logprobs, _ = found.get(output.request_id, ((), (), None))
                found[output.request_id] = tokens + output.token_ids, logprobs + (output.logprobs or ()), output.finish_reason
        return found

    assert told(async_scheduling=True) == told()


def test_an_aborted_request_s_token_in_flight_is_dropped_and_its_blocks_are_free_at_once(engine, recorder):
    submit(engine, "r")
    steps(engine, 2)
    engine.take_outputs()
    engine.abort(["r"])
    assert engine.scheduler.pool.num_free == engine.config.num_blocks
    assert outputs(engine) == [("r", 1, 0, "abort")]
    recorder.take()
    engine.step()
    assert recorder.take() == ["landed 2", "dropped 2 r why=aborted"]
    assert not engine.has_work() and outputs(engine) == []


def test_a_token_in_flight_of_an_id_that_is_used_again_is_not_the_new_request_s(engine, recorder, drain):
    submit(engine, "r")
    steps(engine, 2)
    engine.abort(["r"])
    submit(engine, "r", max_tokens=2)
    engine.take_outputs()
    recorder.take()
    assert len(drain(engine)["r"]) == 2
    assert "dropped 2 r why=aborted" in recorder.take()


def test_the_row_behind_an_end_of_sequence_token_is_dropped(make_engine, recorder, drain):
    probe = make_engine()
    submit(probe, "r")
    eos = drain(probe)["r"][1]
    engine = make_engine(async_scheduling=True, observer=recorder)
    engine.scheduler.eos_token_ids = (eos,)
    submit(engine, "r", ignore_eos=False)
    assert drain(engine)["r"][-1] == eos
    assert "dropped 3 r why=finished" in recorder.take()


def test_a_token_in_flight_of_a_preempted_request_is_delivered_where_it_waits(make_engine, recorder, drain):
    engine = make_engine(async_scheduling=True, num_blocks=6, prefix_caching=False, observer=recorder)
    submit(engine, "a", "b", max_tokens=10)
    b = engine.scheduler.requests["b"]
    while not b.num_preemptions:
        before = b.num_output_tokens
        engine.step()
    assert b.num_preemptions == 1 and b.num_output_tokens == before + 1, "the landing of that turn reached it"
    assert (b.num_computed_tokens, b.num_output_placeholders, b.blocks) == (0, 0, [])
    sync = make_engine(prefix_caching=False)
    submit(sync, "a", "b", max_tokens=10)
    assert drain(engine) == drain(sync)


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_pause_is_pending_until_the_step_in_flight_has_landed(engine, recorder, mode):
    submit(engine, "r")
    steps(engine, 2)
    engine.take_outputs()
    ticket = engine.begin_pause(mode, clear_cache=False)
    engine.take_outputs()
    assert not engine.pause_complete() and not ticket.done and engine.has_work()
    recorder.take()
    engine.step()
    assert not any(line.startswith("launched") for line in recorder.take())
    engine.take_outputs()
    assert engine.pause_complete() and ticket.done and not engine.has_work()


def test_the_convenience_pause_lands_what_is_in_flight_and_hands_it_over(engine):
    submit(engine, "r")
    steps(engine, 2)
    engine.take_outputs()
    (output,) = engine.pause("keep")
    assert (output.first, len(output.token_ids)) == (1, 1)
    assert engine.is_paused() and not engine.pause_pending


def test_a_token_belongs_to_the_version_at_the_launch_of_its_step(engine, drain):
    submit(engine, "r", max_tokens=4)
    steps(engine, 2)  # the first token has landed, the second is in flight
    engine.update_weight_version("v2", allow_unpaused=True)
    versions = []
    while engine.has_work():
        engine.step()
        versions += [output.weight_versions for output in engine.take_outputs() if output.weight_versions]
    assert versions == [(("default", 0, 2), ("v2", 2, 4))]


def test_going_out_of_service_lands_the_step_in_flight_and_launches_no_other(engine, recorder):
    submit(engine, "r")
    steps(engine, 2)
    engine.take_outputs()

    def breaking():
        yield "model.norm.weight", engine.runner.model.state_dict()["model.norm.weight"].clone()
        raise OSError("link down")

    engine.start_weight_update(allow_unpaused=True)
    with pytest.raises(Exception, match="link down"):
        engine.update_weights(breaking())
    recorder.take()
    assert engine.has_work()
    engine.step()
    assert recorder.take() == ["landed 2 r", "stored r 1:1"]
    assert not engine.has_work() and outputs(engine) == [("r", 1, 1, None)]


def test_logits_that_are_not_finite_show_when_their_step_lands(engine, recorder):
    submit(engine, "r")
    steps(engine, 2)
    norm = torch.full((64,), 1e38)
    engine.pause("keep", clear_cache=False)
    engine.load_weights([("model.layers.0.input_layernorm.weight", norm), ("model.layers.1.input_layernorm.weight", norm)], "v2")
    engine.resume()
    engine.step()
    recorder.take()
    with pytest.raises(NotFinite, match="the logits of r"):
        engine.step()
    assert [line.split(" why=")[0] for line in recorder.take()] == ["launched 4 [[r 9 1]]", "step_failed 3"]


def test_halves_of_a_turn_leave_room_for_calls_in_between(engine, recorder):
    submit(engine, "r")
    steps(engine, 2)
    engine.launch()
    assert engine.landing_due and not engine.launch_due
    engine.abort(["r"])
    engine.land()
    engine.land()
    assert not engine.has_work()
    assert [line for line in recorder.take() if line.startswith("dropped")] == ["dropped 2 r why=aborted", "dropped 3 r why=aborted"]
