"""A failing case is cut down to what shows the failure, the same failure, and the file that is left reproduces it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from harness.backends.sim import SimBackend
from harness.events import Event
from harness.fuzz.case import API_TRUTH, CONFORMANCE, Case, Outcome, run_case
from harness.fuzz.hunt import Settings, hunt, primary
from harness.fuzz.shrink import shrink, shrink_case
from harness.operations import Abort, Advance, FinishWeightUpdate, Pause, Prompt, Resume, Step, Submit
from harness.scenario import EngineShape, dump, load_scenario

SHAPE = EngineShape(block_size=2, num_blocks=6, max_model_len=20, max_num_seqs=2, max_num_batched_tokens=8, late_requests="reject")


class LosesTokens(SimBackend):
    """Forgets to deliver what is sampled in a step in which somebody was preempted."""

    name = "loses-tokens"

    def step(self) -> list[Event]:
        events = super().step()
        preempted = any(event.__struct_config__.tag == "preempted" for event in events)
        return [event for event in events if not (preempted and event.__struct_config__.tag == "delivered")]


class Crashes(SimBackend):
    """In `abort` if paused, and in `finish_weight_update` always."""

    name = "crashes"

    def apply(self, op, operation) -> list[Event]:
        if isinstance(operation, FinishWeightUpdate):
            raise KeyError("session")
        if isinstance(operation, Abort) and self.state().pause_mode is not None:
            raise ValueError("a frozen request")
        return super().apply(op, operation)


def first_failure(backend: SimBackend, wanted: Callable[[Outcome], bool] = lambda outcome: True) -> Outcome:
    found = (outcome for _, outcome in hunt(backend, range(2000), Settings()) if not outcome.clean)
    return next(outcome for outcome in found if wanted(outcome))


def submit(id: str, tokens: int = 4, max_tokens: int = 6) -> Submit:
    return Submit(id=id, prompt=Prompt(tokens=tokens, seed=2), max_tokens=max_tokens, cache_salt="a")


def test_operations_arguments_and_the_engine_become_plain():
    operations = (submit("r3"), Step(), Step(), submit("r5"), Pause(mode="keep"), Abort(ids=("r5", "r3")), Resume(), Advance(steps=3))
    case = Case(engine=SHAPE, operations=operations)

    def fails(candidate: Case) -> bool:
        verbs = [operation.verb for operation in candidate.operations]
        return "pause" in verbs and "abort" in verbs[verbs.index("pause") :]

    small = shrink_case(case, fails)
    assert small.operations == (
        Submit(id="r1", prompt=Prompt(tokens=1), max_tokens=1),
        Pause(mode="keep", clear_cache=False),
        Abort(ids=("r1",)),
    )
    assert (small.engine.late_requests, small.engine.num_blocks) == ("queue", 12)


def test_no_case_is_tried_twice_and_time_is_kept():
    tried: list[Case] = []
    case = Case(engine=SHAPE, operations=tuple(submit(f"r{number}") for number in range(1, 6)))
    shrink_case(case, lambda candidate: bool(tried.append(candidate)))
    assert len(tried) == len({(one.engine, one.operations) for one in tried})
    tried.clear()
    assert shrink_case(case, lambda candidate: bool(tried.append(candidate)), until=0.0) == case
    assert not tried


def test_the_finding_stays_the_one_that_is_shrunk():
    outcome = first_failure(LosesTokens(), lambda outcome: {"token-conservation", CONFORMANCE} <= {one.id for one in outcome.findings})
    small = shrink(outcome, "token-conservation", LosesTokens())
    assert small.finding("token-conservation") is not None
    assert len(small.case.operations) <= 4 < len(outcome.case.operations), dump(small.case.scenario("small"))


def test_one_crash_does_not_slide_into_another():
    outcome = first_failure(Crashes(), lambda outcome: "a frozen request" in primary(outcome.findings).sentence)
    small = shrink(outcome, API_TRUTH, Crashes())
    assert "a frozen request" in primary(small.findings).sentence
    pauses = [operation.verb for operation in small.case.operations if not isinstance(operation, Submit)]
    assert pauses in (["pause", "abort"], ["sleep", "abort"]) and len(small.case.operations) <= 3


def test_a_crash_in_an_abort_of_a_request_that_was_never_handed_in_is_a_file_that_reproduces_it():
    operations = (Pause(), Step(), Abort(ids=("r6",)), submit("r6"))
    outcome = run_case(Case(engine=SHAPE, operations=operations), Crashes())
    assert outcome.case.operations == (Pause(), Step(), Abort(ids=("r6",)), submit("r6"))
    small = shrink(outcome, API_TRUTH, Crashes())
    assert [operation.verb for operation in small.case.operations] == ["pause", "abort", "submit"]
    assert "a frozen request" in primary(run_case(Case.of(small.case.scenario("small")), Crashes()).findings).sentence


def test_a_minimal_file_reproduces_ten_times_out_of_ten(tmp_path: Path):
    small = shrink(first_failure(LosesTokens()), "token-conservation", LosesTokens())
    (tmp_path / "minimal.yaml").write_text(dump(small.case.scenario("minimal")))
    case = Case.of(load_scenario(tmp_path / "minimal.yaml"))
    for _ in range(10):
        assert run_case(case, LosesTokens(), drain=False).finding("token-conservation") is not None


def test_a_finding_that_is_not_there_cannot_be_shrunk():
    clean = run_case(Case(engine=SHAPE, operations=(submit("r1"),)), SimBackend())
    with pytest.raises(ValueError, match="not golden"):
        shrink(clean, "golden", SimBackend())
