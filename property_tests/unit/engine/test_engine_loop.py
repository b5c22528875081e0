"""The core's loop, without a thread: what it reports, in which order, for calls that arrive between given turns."""

from __future__ import annotations

import pytest

from engine import Observer, SamplingParams
from engine import messages as m
from engine.connection import SentCall
from engine.loop import CoreLoop

PROMPT = tuple(range(20, 26))


class ScriptedPort:
    """Hands calls out a list at a time, each when the loop comes round to it, then a shutdown; keeps the reports."""

    def __init__(self, *calls: list[m.Call], drain_s: float = 0.0) -> None:
        self._coming = [*calls, [m.Shutdown(call=0, drain_s=drain_s, why="the script is over")]]
        self.reports: list[m.Report] = []

    def take(self, *, wait):
        calls = self._coming.pop(0) if self._coming else []
        assert calls or not wait, "the loop would wait for ever"
        return [SentCall(call) for call in calls]

    def send(self, report):
        self.reports.append(report)

    @property
    def words(self) -> list[str]:
        return [words(report) for report in self.reports]


def words(report: m.Report) -> str:
    match report:
        case m.Outputs(outputs=outputs):
            return "outputs " + " ".join(
                f"{o.request_id}+{len(o.token_ids)}{f' {o.finish_reason}' if o.finish_reason else ''}" for o in outputs
            )
        case m.Answer(call=call, answer=answer):
            return f"answer {call} {' '.join(map(str, answer.values()))}"
        case m.Refusal(call=call, error=error):
            return f"refusal {call} {error}"
        case m.Stopped(why=why):
            return f"stopped: {why}"
    raise AssertionError(report)


def submit(call: int, request_id: str, max_tokens: int = 50) -> m.Submit:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return m.Submit(call=call, request_id=request_id, prompt_token_ids=PROMPT, params=params)


def pause(call: int, mode: str) -> m.Pause:
    return m.Pause(call=call, mode=mode, clear_cache=False)


@pytest.fixture
def run(make_engine):
    """run(port): the loop until it stops; what it reported, in words."""

    def run_loop(port: ScriptedPort, observer: Observer | None = None, **overrides) -> list[str]:
        observer = observer or Observer()
        CoreLoop(make_engine(observer=observer, **overrides), observer, port).run()
        return port.words

    return run_loop


def test_a_pause_is_answered_behind_the_outputs_that_it_ended(run):
    assert run(ScriptedPort([submit(1, "r1")], [], [pause(2, "abort")])) == [
        "answer 1 queued",
        "outputs r1+1",
        "outputs r1+1",
        "outputs r1+0 abort",
        "answer 2 paused",
        "stopped: the script is over",
    ]


def test_a_keep_pause_waits_for_the_step_in_flight(run):
    port = ScriptedPort([submit(1, "r1")], [], [pause(2, "keep")], [m.IsPaused(call=3)])
    assert run(port, async_scheduling=True) == [
        "answer 1 queued",
        "outputs r1+1",  # the turn that launched step 2 landed step 1; step 2 is in flight when the pause comes
        "outputs r1+1",
        "answer 2 paused",
        "answer 3 True",
        "outputs r1+0 abort",
        "stopped: the script is over",
    ]


def test_a_wait_pause_is_answered_when_the_last_request_has_ended(run):
    assert run(ScriptedPort([submit(1, "r1", 3)], [pause(2, "wait"), submit(3, "late")], [], [m.Resume(call=4)])) == [
        "answer 1 queued",
        "outputs r1+1",
        "answer 3 parked",
        "outputs r1+1",
        "outputs r1+1 length",
        "answer 2 paused",
        "answer 4 resumed",
        "outputs late+1",
        "outputs late+0 abort",
        "stopped: the script is over",
    ]


@pytest.mark.parametrize("overriding", [pause(3, "keep"), m.Resume(call=3)], ids=["keep", "resume"])
def test_a_superseded_pause_fails_before_what_superseded_it_is_answered(run, overriding):
    reports = run(ScriptedPort([submit(1, "r1")], [pause(2, "wait")], [overriding]))
    answered = [report for report in reports if report.startswith(("answer", "refusal"))]
    assert answered == ["answer 1 queued", "refusal 2 PauseSuperseded", f"answer 3 {'paused' if overriding.verb == 'pause' else 'resumed'}"]


def test_an_abort_completes_the_wait_that_it_overrides(run):
    reports = run(ScriptedPort([submit(1, "r1")], [pause(2, "wait")], [pause(3, "abort")]))
    assert reports[-4:-1] == ["outputs r1+0 abort", "answer 2 paused", "answer 3 paused"]


def test_a_sleep_is_answered_when_memory_was_given_back(run, recorder):
    reports = run(ScriptedPort([submit(1, "r1")], [m.Sleep(call=2, level=1, mode="keep"), m.IsSleeping(call=3)]), recorder)
    assert reports[2:4] == ["answer 2 sleeping", "answer 3 True"]
    slept = next(i for i, line in enumerate(recorder.log) if line.startswith("asleep"))
    assert recorder.log[slept + 1].startswith("returned 2")


def test_shutdown_lets_requests_end_within_its_time_and_takes_none_on(run):
    port = ScriptedPort([submit(1, "r1", 3)], drain_s=60)
    port._coming.append([submit(2, "r2")])
    assert run(port) == [
        "answer 1 queued",
        "outputs r1+1",
        "outputs r1+1",
        "refusal 2 EngineDeadError",
        "outputs r1+1 length",
        "stopped: the script is over",
    ]


def test_shutdown_does_not_wait_for_what_a_pause_froze(run):
    reports = run(ScriptedPort([submit(1, "r1")], [pause(2, "keep")], drain_s=3600))
    assert reports[-2:] == ["outputs r1+0 abort", "stopped: the script is over"]


def test_an_earlier_deadline_overrides_a_drain(run):
    port = ScriptedPort([submit(1, "r1")], [m.Shutdown(call=0, drain_s=3600, why="first")])
    assert run(port)[-2:] == ["outputs r1+0 abort", "stopped: the script is over"]


def test_a_loop_that_breaks_says_why(run):
    class Breaks(Observer):
        def launched(self, step, batch):
            if step == 2:
                raise OSError("no space left on device")

    assert run(ScriptedPort([submit(1, "r1")], [], []), Breaks())[1:] == ["outputs r1+1", "stopped: OSError: no space left on device"]


def test_the_observer_hears_of_a_call_and_of_a_turn_as_one_thing_each(run, recorder):
    run(ScriptedPort([submit(1, "r1", 2)], [m.Pause(call=2, mode="wait", clear_cache=True, note="mine")]), recorder)
    names = [line.split(" params=")[0].split(" ")[0] for line in recorder.log]
    turns = " ".join(names).split(" boundary")
    assert turns == [
        "called accepted returned",
        " allocated stored admitted launched landed delivered",
        " called pause_pending",
        " launched landed finished freed delivered cleared pause_effective returned",
        " called returned",
        " stopped",
    ]
    assert any(line.startswith("called 2 pause") and line.endswith("note=mine") for line in recorder.log)


def test_what_a_shutdown_ends_is_told_as_an_abort_of_all(run, recorder):
    run(ScriptedPort([submit(1, "r1")], [pause(2, "keep")]), recorder)
    names = [line.split(" ")[0] for line in recorder.log]
    assert names[-7:] == ["called", "finished", "freed", "delivered", "returned", "boundary", "stopped"]
    assert recorder.log[-7].startswith("called 0 abort") and recorder.log[-3].startswith("returned 0")


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_the_prefix_cache_is_counted_by_first_admissions(run, prefix_caching: bool):
    ask_twice = [[submit(1, "r1", 1)], [submit(2, "r2", 1)]]
    preempt = [[pause(3, "keep")], [m.ResetPrefixCache(call=4), m.Resume(call=5)], [m.GetCounters(call=6)]]
    port = ScriptedPort(*ask_twice, [submit(7, "r3", 4)], *preempt)
    run(port, prefix_caching=prefix_caching, block_size=4)
    (counters,) = [report.answer for report in port.reports if isinstance(report, m.Answer) and report.call == 6]
    counted = (counters["prefix_cache_queries"], counters["prefix_cache_hits"])
    assert counted == ((3 * len(PROMPT), 2 * 4) if prefix_caching else (0, 0))


def test_a_session_that_counts_its_parts_needs_them_all(run):
    def part(call, number, of):
        return m.UpdateWeights(call=call, folder=None, part=number, of=of)

    calls = [
        pause(1, "keep"),
        m.StartWeightUpdate(call=2, allow_unpaused=False),
        part(3, 1, 2),
        part(4, 1, 3),
        part(5, 3, 2),
        m.FinishWeightUpdate(call=6, version="v2"),
        part(7, 2, 2),
        m.FinishWeightUpdate(call=8, version="v2"),
    ]
    assert run(ScriptedPort(calls))[2:-1] == [
        "answer 3 updated",
        "refusal 4 InvalidArgument",
        "refusal 5 InvalidArgument",
        "refusal 6 Conflict",
        "answer 7 updated",
        "answer 8 finished v2",
    ]


def test_counters_tell_where_every_request_is(run):
    calls = [pause(4, "keep"), submit(5, "r3"), m.GetCounters(call=6)]
    port = ScriptedPort([submit(1, "r1"), submit(2, "r2")], [], calls)
    run(port, late_requests="block")
    (report,) = [report for report in port.reports if isinstance(report, m.Answer) and report.call == 6]
    counters = report.answer
    assert (counters["running"], counters["waiting"], counters["blocked"]) == (2, 0, 1)
    assert (counters["prompt_tokens"], counters["generated_tokens"]) == (3 * len(PROMPT), 4)
    assert (counters["pause_mode"], counters["pause_pending"]) == ("keep", False)
