"""The live driver: a timeline in real time, on the model as an engine that runs by itself."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest

from harness import verbs
from harness.backends import Answer, EngineInfo
from harness.events import Answered, Asked, Called, Closed, Event, Heard, Landed, Launched, Resumed
from harness.fuzz.case import run_case
from harness.fuzz.generate import case_of
from harness.log import read_log
from harness.operations import Operation, Pause
from harness.scenario import EngineShape, load_scenario
from harness.trial import CannotRun, Trial, review, run_live_trial

from .sim_live import Hear, SimLive, events_of, run_live

SUBMIT = "  - submit: {id: r1, prompt: {tokens: 6, seed: 1}, max_tokens: 20}\n"


def asked(events: list[Event]) -> list[str]:
    return [next(iter(event.operation)) for event in events if isinstance(event, Asked)]


def closed(trial: Trial, writer: str = "client") -> Closed:
    return next(entry.event for entry in trial.entries if entry.writer == writer and isinstance(entry.event, Closed))


def test_a_request_runs_to_its_end_and_its_client_hears_every_token(tmp_path: Path) -> None:
    trial = run_live(tmp_path, SUBMIT)
    assert trial.verdict.status == "holds", trial.verdict.reasons
    client = events_of(tmp_path, "client")
    tokens = [token for event in client if isinstance(event, Heard) for output in event.outputs for token in output.tokens]
    sampled = [token for event in events_of(tmp_path, "r0") if isinstance(event, Landed) for _, token in event.sampled]
    assert tokens == sampled and len(tokens) == 20


def test_every_invariant_is_judged_once_and_the_model_explains_the_ranks_log(tmp_path: Path) -> None:
    trial = run_live(tmp_path, SUBMIT)
    ids = [judgement.invariant for judgement in trial.verdict.judgements]
    assert len(set(ids)) == len(ids)
    assert trial.verdict.explanation is not None and trial.verdict.explanation.mismatch is None
    assert trial.verdict.explanation.events == len(events_of(tmp_path, "r0"))


def test_a_stored_run_is_judged_as_it_was_when_it_ended(tmp_path: Path) -> None:
    trial = run_live(tmp_path, SUBMIT)
    assert review(read_log(tmp_path), load_scenario(tmp_path / "scenario.yaml")).verdict == trial.verdict


@pytest.mark.parametrize(
    ("timeline", "why"),
    [
        (SUBMIT, "drained"),
        (SUBMIT + "  - {when: {request: r1, tokens: 3}, pause: {mode: keep}}\n", "paused"),
        (SUBMIT + "  - {when: {request: r1, tokens: 3}, pause: {mode: abort}}\n", "drained"),
        (
            SUBMIT + "  - {when: {request: r1, tokens: 3}, pause: {mode: keep}, as: p}\n"
            "  - {when: {returned: p}, swap_weights: {source: {original: true}, fails: true}}\n",
            "out-of-service",
        ),
    ],
    ids=["drained", "paused", "paused without a live request", "out of service"],
)
@pytest.mark.parametrize("level", [0, 2])
def test_the_log_says_why_the_run_ended(tmp_path: Path, timeline: str, why: str, level: int) -> None:
    trial = run_live(tmp_path, timeline, SimLive(level=level), head=f"expect: {{ends: {why}}}\n")
    assert closed(trial).why == why
    assert trial.verdict.status == "holds", trial.verdict.reasons


def test_calls_do_not_block_the_timeline(tmp_path: Path) -> None:
    """A resume overtakes the pause(wait) that it supersedes; nobody waits for the one to make the other."""
    trial = run_live(tmp_path, SUBMIT + "  - {when: {request: r1, tokens: 2}, pause: {mode: wait}, as: p}\n  - resume: {}\n")
    refused = [event.error.code for event in events_of(tmp_path, "client") if isinstance(event, Answered) and event.error]
    assert refused == ["superseded"] and trial.verdict.status == "holds", trial.verdict.reasons


@pytest.mark.parametrize(
    "when", ["{step: 3}", "{request: r2, state: running}", "{called: s2}", "{request: r1, state: finished}", "{ms: 5}"]
)
def test_triggers_of_every_kind_fire(tmp_path: Path, when: str) -> None:
    timeline = SUBMIT + "  - submit: {id: r2, prompt: {tokens: 5, seed: 2}, max_tokens: 4}\n"
    timeline = timeline.replace("- submit: {id: r1", "- {submit: {id: r1").replace("max_tokens: 20}\n", "max_tokens: 20}, as: s2}\n", 1)
    run_live(tmp_path, timeline + f"  - {{when: {when}, is_paused: {{}}}}\n")
    assert asked(events_of(tmp_path, "client")) == ["submit", "submit", "is_paused"]


@pytest.mark.parametrize("when", ["{step: 3}", "{request: r1, state: running}"])
def test_a_trigger_that_no_client_can_see_is_named_where_no_rank_shows_it(tmp_path: Path, when: str) -> None:
    trial = run_live(tmp_path, SUBMIT + f"  - {{when: {when}, is_paused: {{}}}}\n", SimLive(level=0))
    assert trial.verdict.status == "unknown" and "never fired, line 6: is_paused" in trial.verdict.reasons


def test_step_lets_the_engine_make_a_step_and_ends_where_none_comes(tmp_path: Path) -> None:
    timeline = SUBMIT + "  - advance: {steps: 4}\n  - pause: {mode: keep}\n  - step: {}\n  - resume: {}\n"
    trial = run_live(tmp_path, timeline)
    assert trial.verdict.status == "holds", trial.verdict.reasons
    events = [entry.event for entry in trial.entries]
    paused = next(place for place, event in enumerate(events) if isinstance(event, Asked) and "pause" in event.operation)
    assert sum(isinstance(event, Launched) for event in events[:paused]) >= 4
    assert any(isinstance(event, Resumed) for event in events)


def test_an_answer_that_never_comes_ends_the_run_within_the_bound(tmp_path: Path) -> None:
    class Deaf(SimLive):
        def answer(self, op: int, content: dict[str, object]) -> None:
            if content != {"status": "paused"}:
                super().answer(op, content)

    trial = run_live(tmp_path, SUBMIT + "  - {when: {request: r1, tokens: 2}, pause: {mode: keep}}\n", Deaf(), bound_ms=100)
    assert closed(trial).why == "stalled"
    assert [judgement.invariant for judgement in trial.verdict.judgements if judgement.status == "violated"] == [
        "one-ending",
        "quiet-after-pause",
    ]


def test_an_engine_that_dies_is_a_crash_that_says_where(tmp_path: Path) -> None:
    class Dies(SimLive):
        async def call(self, operation: Operation, heard: Hear) -> Answer:
            if operation.verb == "resume":
                raise OSError("the core is gone")
            return await super().call(operation, heard)

    trial = run_live(tmp_path, SUBMIT + "  - resume: {}\n", Dies())
    assert closed(trial).why == "crashed" and trial.verdict.status == "violated"
    assert "in call #1, resume: OSError: the core is gone" in trial.verdict.reasons[0]


def test_what_an_engine_cannot_be_asked_for_is_refused_before_the_run(tmp_path: Path) -> None:
    class Simple(SimLive):
        def cannot(self, operation: Operation) -> str | None:
            return "sleep: it has no such call" if operation.verb == "sleep" else None

    with pytest.raises(CannotRun, match=r"scenario\.yaml:6: sim-live cannot sleep: it has no such call"):
        run_live(tmp_path, SUBMIT + "  - sleep: {}\n", Simple())


def test_ctrl_c_leaves_nothing_paused_and_nobody_waiting(tmp_path: Path) -> None:
    calls: list[str] = []

    class Watched(SimLive):
        async def call(self, operation: Operation, heard: Hear) -> Answer:
            calls.append(operation.verb)
            return await super().call(operation, heard)

    file = tmp_path / "scenario.yaml"
    timeline = SUBMIT + "  - {when: {request: r1, tokens: 3}, pause: {mode: keep}}\n  - {when: {ms: 60000}, resume: {}}\n"
    file.write_text(f"schema: 1\nname: live\ntimeline:\n{timeline}")

    async def run() -> Trial:
        backend = Watched()
        asyncio.get_running_loop().call_later(0.3, os.kill, os.getpid(), signal.SIGINT)
        try:
            trial = await run_live_trial(load_scenario(file), backend, tmp_path)
            assert calls[-2:] == ["abort", "resume"]
            state = backend._sim.state()
            assert state.pause_mode is None and not state.running and not state.waiting
            assert len(asyncio.all_tasks()) == 2, "this one, and the engine's"
            return trial
        finally:
            await backend.stop()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        trial = asyncio.run(run())
    finally:
        signal.signal(signal.SIGINT, before)
    assert trial.interrupted and closed(trial, "r0").why == "interrupted"


def test_a_log_that_cannot_be_written_ends_the_recording_and_not_the_engine(tmp_path: Path) -> None:
    class DiskFull(SimLive):
        def hand_out(self, outputs: object) -> None:
            super().hand_out(outputs)  # type: ignore[arg-type]
            if self._log is not None and self._log._writer is not None:
                self._log._writer.close()

    trial = run_live(tmp_path, SUBMIT, DiskFull())
    assert trial.verdict.reasons == ("the log of r0 is not closed: it ends where its writer was stopped",)
    assert sum(len(output.tokens) for entry in trial.entries if isinstance(entry.event, Heard) for output in entry.event.outputs) == 20


def test_the_writers_share_one_clock(tmp_path: Path) -> None:
    """What a client asks for stands before the core takes it up, and what is delivered before it is heard."""
    trial = run_live(tmp_path, SUBMIT + "  - {when: {request: r1, tokens: 3}, is_paused: {}}\n")
    order = [entry.event for entry in trial.entries]
    for verb in ("submit", "is_paused"):
        ask = next(place for place, event in enumerate(order) if isinstance(event, Asked) and verb in event.operation)
        call = next(place for place, event in enumerate(order) if isinstance(event, Called) and verb in event.operation)
        assert ask < call


def test_a_log_that_is_written_late_does_not_end_the_run(tmp_path: Path) -> None:
    """An answer may reach its client before the rank's log tells of it."""

    class WritesLate(SimLive):
        async def call(self, operation: Operation, heard: Hear) -> Answer:
            assert self._log is not None
            append, late = self._log.append, []
            if operation.verb == "resume":
                self._log.append = lambda *transaction: late.append(transaction)  # type: ignore[method-assign]
                asyncio.get_running_loop().call_later(0.1, lambda: [append(*transaction) for transaction in late])
                asyncio.get_running_loop().call_later(0.1, setattr, self._log, "append", append)
            return await super().call(operation, heard)

    timeline = SUBMIT + "  - {when: {request: r1, tokens: 3}, pause: {mode: keep}, as: p}\n  - {when: {returned: p}, resume: {}}\n"
    trial = run_live(tmp_path, timeline, WritesLate())
    assert closed(trial).why == "drained", trial.verdict.reasons


def test_random_cases_hold_and_are_explained() -> None:
    found = {seed: run_case(case_of(seed), SimLive(step_s=0.0005)).findings for seed in range(30)}
    assert {seed: findings for seed, findings in found.items() if findings} == {}


def test_logs_of_two_ranks_are_judged_and_explained_each_by_itself(tmp_path: Path) -> None:
    run_live(tmp_path, SUBMIT + "  - {when: {request: r1, tokens: 3}, pause: {mode: keep}, as: p}\n  - {when: {returned: p}, resume: {}}\n")
    (tmp_path / "events.client.jsonl").unlink()
    one = review(read_log(tmp_path), None)
    (tmp_path / "events.r1.jsonl").write_bytes((tmp_path / "events.r0.jsonl").read_bytes())
    two = review(read_log(tmp_path), None)
    assert one.verdict.status == two.verdict.status == "holds"
    assert one.verdict.explanation is not None and two.verdict.explanation is not None
    assert two.verdict.explanation.events == 2 * one.verdict.explanation.events


KEPT = "expect: {reaches: [keep-pause-kept]}\n"
PAUSE = "  - {when: {request: r1, tokens: 3}, pause: {mode: keep, clear_cache: false}, as: p}\n  - {when: {returned: p}, resume: {}}\n"


@pytest.mark.parametrize(
    ("timeline", "missed"),
    [
        (SUBMIT + PAUSE, []),
        (SUBMIT, ["keep-pause-kept was to be reached and was not"]),
        (SUBMIT + PAUSE + "  - {when: {step: 900}, is_paused: {}}\n", ["never fired, line 9: is_paused"]),
    ],
)
def test_what_did_not_come_about_is_told_from_what_is_wrong(tmp_path: Path, timeline: str, missed: list[str]) -> None:
    verdict = run_live(tmp_path, timeline, head=KEPT).verdict
    assert list(verdict.missed) == list(verdict.reasons) == missed
    assert verdict.missed_its_point == bool(missed)


class Late(SimLive):
    """Its clients' pauses come when all is over, but in the third run."""

    starts = 0

    async def start(self, shape: EngineShape, folder: Path) -> EngineInfo:
        self.starts += 1
        return await super().start(shape, folder)

    async def call(self, operation: Operation, heard: Hear) -> Answer:
        while isinstance(operation, Pause) and self.starts < 3 and self._clients:
            await asyncio.sleep(0.001)
        return await super().call(operation, heard)


def test_a_run_that_missed_its_moment_is_run_again_and_only_the_last_is_kept(tmp_path: Path, monkeypatch, capsys) -> None:
    file = tmp_path / "late.yaml"
    file.write_text(f"schema: 1\nname: late\n{KEPT}timeline:\n{SUBMIT}{PAUSE}")
    monkeypatch.setattr(verbs, "is_live", lambda engine: True)
    monkeypatch.setattr(verbs, "make_live_backend", lambda engine: Late())
    asked = verbs.Asked(overrides=(), runs=tmp_path / "runs", seed=0, as_json=True, min_pass_rate=1.0)
    assert verbs.run([file], asked, engine="sim-live") == 0
    assert len([folder for folder in (tmp_path / "runs").iterdir() if not folder.is_symlink()]) == 1
    said = capsys.readouterr()
    assert said.err.count("keep-pause-kept was to be reached and was not; run again") == 2
    assert json.loads(said.out)["attempts"] == 3
