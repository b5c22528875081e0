"""A case does what `caesura run` does with the same operations, and says what was wrong and when."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from harness.backends.sim import SimBackend
from harness.errors import BadInput
from harness.events import Event
from harness.execute import Lockstep
from harness.fuzz.case import API_TRUTH, CONFORMANCE, ENDS, STALLED_STEPS, Case, run_case
from harness.fuzz.generate import case_of
from harness.operations import (
    Abort,
    Advance,
    Operation,
    Pause,
    Prompt,
    Resume,
    Sleep,
    StartWeightUpdate,
    Step,
    Submit,
    SwapWeights,
    UpdateWeights,
    WakeUp,
    WeightSource,
)
from harness.scenario import EngineShape, Scenario, TimelineEntry, When, dump, load_scenario
from harness.trial import opened_event

ORIGINAL = WeightSource(original=True)
SHAPE = EngineShape(block_size=4, num_blocks=8, max_model_len=32, max_num_seqs=2, max_num_batched_tokens=8)


def submit(id: str = "r1", tokens: int = 3, max_tokens: int = 4) -> Submit:
    return Submit(id=id, prompt=Prompt(tokens=tokens), max_tokens=max_tokens)


def a_case(*operations) -> Case:
    return Case(engine=SHAPE, operations=operations)


class Broken(SimBackend):
    """The model, wrong in one way, under another name, so that it is compared with the right one."""

    name = "broken"

    def __init__(self, *, dies_in: str = "", hangs_in: str = "", never_resumes: bool = False, idles: bool = False) -> None:
        super().__init__()
        self.how = SimpleNamespace(dies_in=dies_in, hangs_in=hangs_in, never_resumes=never_resumes, idles=idles)

    def apply(self, op, operation) -> list[Event]:
        if operation.verb == self.how.dies_in:
            raise AssertionError("no such block")
        if operation.verb == self.how.hangs_in:
            threading.Event().wait()
        if self.how.never_resumes and isinstance(operation, Resume):
            return []
        return super().apply(op, operation)

    def step(self) -> list[Event]:
        return [] if self.how.idles else super().step()


@pytest.mark.parametrize("seed", range(25))
def test_a_case_is_the_run_of_its_scenario_event_for_event(seed: int) -> None:
    outcome = run_case(case_of(seed), SimBackend())
    backend, entries = SimBackend(), []
    opened = opened_event(outcome.case.engine, backend, backend.start(outcome.case.engine), digest="", seed=seed)
    Lockstep(outcome.case.scenario("same"), backend, [entries.extend]).run(opened)
    assert entries == outcome.entries


def test_a_scenario_file_of_a_case_reads_back_as_that_case(tmp_path: Path) -> None:
    case = run_case(case_of(7), SimBackend()).case
    (tmp_path / "case.yaml").write_text(dump(case.scenario("seven")))
    assert Case.of(load_scenario(tmp_path / "case.yaml")).operations == case.operations


def test_a_case_ends_drained_whatever_it_left() -> None:
    broken_half_way = SwapWeights(source=WeightSource(original=True), fails=True)
    outcome = run_case(a_case(submit(), Step(), Pause(mode="keep"), broken_half_way), SimBackend())
    assert (outcome.ended, outcome.clean) == ("drained", True)
    assert [operation.verb for operation in outcome.case.operations[4:]] == ["resume", "pause", "step", "swap_weights", "resume"]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "left",
    [
        (StartWeightUpdate(allow_unpaused=True), UpdateWeights(source=ORIGINAL, fails=True)),
        (Pause(mode="keep"), Step(), StartWeightUpdate(), UpdateWeights(source=ORIGINAL, part=1, of=2)),
        (Sleep(level=1, mode="keep"),),
        (Sleep(level=2, mode="keep"), Step(), WakeUp(tags=("weights",)), StartWeightUpdate()),
        (Pause(mode="keep"), Sleep(level=2)),
    ],
    ids=["failed beside steps", "half a session", "asleep", "half awake in a session", "paused and asleep"],
)
def test_a_case_is_brought_back_from_wherever_it_was_left(left: tuple[Operation, ...], asynchronous: bool) -> None:
    shape = SHAPE.model_copy(update={"async_scheduling": asynchronous})
    outcome = run_case(Case(engine=shape, operations=(submit(), Step(), *left)), SimBackend())
    assert (outcome.ended, outcome.findings) == ("drained", ())


def test_without_a_drain_a_case_ends_as_it_stands() -> None:
    outcome = run_case(a_case(submit(), Step(), Pause(mode="keep")), SimBackend(), drain=False)
    assert (outcome.ended, outcome.clean) == ("paused", True)


def test_operations_are_counted_up_to_where_it_showed() -> None:
    outcome = run_case(a_case(submit(), Advance(steps=2), Pause(mode="keep"), submit("r2")), Broken(dies_in="pause"))
    (finding,) = outcome.findings
    assert (finding.id, finding.operations, outcome.operations, outcome.ended) == (API_TRUTH, 4, 4, "crashed")
    assert finding.sentence.startswith("the engine crashed in call #1, pause: AssertionError: no such block (test_case.py:")
    assert "raise AssertionError" in finding.detail


def test_an_engine_that_hangs_is_interrupted_and_its_stack_shown() -> None:
    outcome = run_case(a_case(submit(), Abort(ids="all")), Broken(hangs_in="abort"), hang_s=0.2)
    (finding,) = outcome.findings
    assert (finding.id, outcome.ended) == (API_TRUTH, "crashed")
    assert finding.sentence == "the engine hangs in call #1, abort: no answer within 0.2 s"
    assert "threading.Event().wait()" in finding.detail


def test_an_engine_that_does_not_come_back_is_found() -> None:
    outcome = run_case(a_case(submit(), Step(), Pause(mode="keep")), Broken(never_resumes=True))
    assert outcome.finding(ENDS) is not None
    assert outcome.finding(CONFORMANCE) is not None
    assert outcome.ended == "paused"


def test_an_engine_that_steps_for_ever_is_given_up() -> None:
    outcome = run_case(a_case(submit()), Broken(idles=True), explain=False)
    assert outcome.ended == "stalled"
    assert outcome.operations <= STALLED_STEPS + 3
    assert {"one-ending", ENDS} <= {finding.id for finding in outcome.findings}


def test_a_difference_from_the_model_is_found_and_the_case_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = Broken()
    right = backend.state
    monkeypatch.setattr(backend, "state", lambda: _with_version(right(), "v9"))
    outcome = run_case(a_case(submit()), backend)
    assert outcome.findings[0].id == CONFORMANCE
    assert outcome.findings[0].sentence == "after this event the visible state differs in weight_version"
    assert outcome.ended == "drained"


def test_what_the_harness_gets_wrong_is_not_held_against_the_engine() -> None:
    def wrong(entries) -> None:
        raise RuntimeError("the listener's own fault")

    with pytest.raises(RuntimeError, match="listener's own"):
        run_case(a_case(submit()), SimBackend(), listener=wrong)


def test_triggers_and_virtual_time_are_refused() -> None:
    scenario = Scenario(name="timed", engine=SHAPE, timeline=(TimelineEntry(operation=Resume(), when=When(step=1)),))
    with pytest.raises(BadInput, match="without `when`"):
        Case.of(scenario)
    with pytest.raises(BadInput, match="no virtual time"):
        run_case(a_case(Advance(ms=3)), SimBackend())


def _with_version(state, version: str):
    import msgspec

    return msgspec.structs.replace(state, weight_version=version)
