"""atomic-commit: all of an update, or nothing."""

from __future__ import annotations

import pytest

from harness.events import Committed, PartReceived, Resumed, UpdateFailed, UpdateStarted
from harness.operations import FinishWeightUpdate, StartWeightUpdate, SwapWeights, UpdateWeights

from .logs import NEW_WEIGHTS, Timeline, said

ID = "atomic-commit"


def part(number: int = 1, of: int = 1) -> PartReceived:
    return PartReceived(part=number, of=of, tensors=1, bytes=4)


def running() -> Timeline:
    return Timeline().submit("r1", [20, 21]).admit("r1", [0]).step(("r1", 0, 2), r1=7)


def frozen() -> Timeline:
    return running().pause("keep").effective("keep")


def open_session(log: Timeline, *, allow_unpaused: bool = False) -> Timeline:
    return log.take_up(StartWeightUpdate(allow_unpaused=allow_unpaused)).add(UpdateStarted()).answer()


def sent(log: Timeline, number: int = 1, of: int = 1) -> Timeline:
    return log.take_up(UpdateWeights(source=NEW_WEIGHTS, part=number, of=of)).add(part(number, of)).answer()


def finished(log: Timeline, asked: str | None = "v2", committed: str = "v2") -> Timeline:
    return log.take_up(FinishWeightUpdate(version=asked)).add(Committed(version=committed)).answer()


def failed(log: Timeline) -> Timeline:
    """The open session breaks after its first byte."""
    log.take_up(UpdateWeights(source=NEW_WEIGHTS, fails=True))
    return log.add(UpdateFailed(phase="update", wrote=True, why="told to fail")).refuse("failed")


def test_an_update_in_parts():
    assert finished(sent(sent(open_session(frozen()), 1, 2), 2, 2)).resume().holds(ID)


def test_an_update_that_was_allowed_beside_steps():
    log = sent(open_session(running(), allow_unpaused=True)).step(("r1", 2, 1), r1=8)
    assert finished(log).holds(ID)


def test_a_full_update_after_one_that_failed():
    log = failed(open_session(frozen()))
    assert finished(sent(open_session(log))).resume().holds(ID)


def test_no_session_while_running():
    violation = open_session(running()).violation(ID)
    assert said(violation) == (
        "a weight session was opened without an effective pause",
        "the start refused, as allow_unpaused was not asked for",
        "a running engine",
    )


def test_no_session_under_a_pause_that_is_pending():
    violation = open_session(running().pause("wait")).violation(ID)
    assert violation.got == "a wait pause that is pending"
    assert [cause.what for cause in violation.cause] == ["pause taken up"]


def test_nothing_is_written_outside_a_session():
    violation = sent(frozen()).violation(ID)
    assert said(violation) == ("weights were written outside a session", "an update without a start refused", "part 1 of 1")


def test_nothing_is_written_beside_a_step():
    log = running().launch(("r1", 2, 1)).pause("keep").effective("keep")
    violation = sent(open_session(log)).violation(ID)
    assert said(violation) == (
        "weights were written while a step that reads them is in flight",
        "every launched step has landed",
        "steps [2] in flight",
    )


@pytest.mark.parametrize("phase", ["part", "finish"])
def test_the_pause_lasts_as_long_as_the_session(phase: str):
    log = open_session(frozen()) if phase == "part" else sent(open_session(frozen()))
    log.pause("wait")
    violation = (sent(log) if phase == "part" else finished(log)).violation(ID)
    assert said(violation) == (
        f"{'weights were written' if phase == 'part' else 'an update was committed'} without an effective pause",
        "an effective pause from start to finish, as allow_unpaused was not asked for",
        "a wait pause that is pending",
    )


def test_no_forward_over_half_new_weights():
    log = sent(open_session(frozen()), 1, 2)
    violation = log.launch(("r1", 2, 1)).violation(ID)
    assert said(violation) == (
        "step 2 runs on weights that are half-written",
        "no forward between the first byte of an update and its commit",
        "a step of [r1]",
    )


def test_no_forward_after_an_update_that_failed():
    log = failed(sent(open_session(frozen()), 1, 2))
    violation = log.launch(("r1", 2, 1)).violation(ID)
    assert violation.sentence == "step 2 runs on weights that nothing may be sampled from"
    assert [cause.what for cause in violation.cause] == ["first byte of epoch 1", "update failed"]


def test_a_failure_after_the_first_byte_says_so():
    log = sent(open_session(frozen())).take_up(FinishWeightUpdate(fails=True))
    violation = log.add(UpdateFailed(phase="finish", wrote=False, why="told to fail")).violation(ID)
    assert said(violation) == (
        "an update failed in finish after it had written weights, and says that it had not",
        "wrote: the engine is out of service",
        "wrote false",
    )


def test_no_resume_with_a_session_open():
    violation = open_session(frozen()).add(Resumed()).violation(ID)
    assert said(violation) == ("the engine resumed with a weight session open", "resume refused until it is finished", "`resumed`")


def test_no_resume_out_of_service():
    violation = failed(open_session(frozen())).add(Resumed()).violation(ID)
    assert said(violation) == ("the engine resumed out of service", "resume refused until a full update succeeds", "`resumed`")


def test_no_commit_without_a_session():
    violation = finished(frozen()).violation(ID)
    assert said(violation) == ("an update was committed without a session", "a finish without a start refused", "v2")


def test_a_part_does_not_end_being_out_of_service():
    violation = finished(sent(open_session(failed(open_session(frozen()))), 1, 2)).violation(ID)
    assert said(violation) == (
        "a partial update ended being out of service",
        "finish refused until every part was received",
        "parts [1] of 2 received",
    )


def test_an_update_is_committed_under_the_version_that_it_names():
    violation = finished(sent(open_session(frozen())), "v2", "v1").violation(ID)
    assert said(violation) == ("an update was committed under another version than its call named", "v2", "v1")


def test_an_update_without_a_version_leaves_the_label():
    assert finished(sent(open_session(frozen())), None, "default").holds(ID)
    violation = finished(sent(open_session(frozen())), None, "v1").violation(ID)
    assert (violation.expected, violation.got) == ("default", "v1")


def test_a_swap_needs_an_effective_pause():
    log = running().take_up(SwapWeights(source=NEW_WEIGHTS, version="v2")).add(UpdateStarted())
    assert log.violation(ID).sentence == "a weight session was opened without an effective pause"


def test_an_empty_step_runs_on_no_weights():
    assert failed(open_session(frozen())).launch().land().holds(ID)


def test_a_later_pause_that_is_pending_ends_no_pause():
    log = open_session(frozen()).pause("keep")
    assert finished(sent(log), "v2", "v2").effective("keep").holds(ID)


def test_a_swap_is_committed_with_its_weights():
    log = frozen().take_up(SwapWeights(source=NEW_WEIGHTS, version="v2")).add(UpdateStarted(), Committed(version="v2"))
    assert said(log.violation(ID)) == (
        "a swap was committed without its weights",
        "`part_received` before `committed`",
        "v2 committed",
    )
