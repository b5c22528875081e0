"""idempotent-control: asking twice is not doing twice."""

from __future__ import annotations

from harness.events import Freed, Preempted, Resumed, UpdateStarted
from harness.operations import Pause, Resume, StartWeightUpdate

from .logs import Timeline, said

ID = "idempotent-control"


def frozen() -> Timeline:
    log = Timeline().submit("r1", [20, 21]).admit("r1", [0]).step(("r1", 0, 2), r1=7)
    return log.pause("keep").effective("keep")


def test_repeated_calls_that_do_nothing():
    log = frozen().pause("keep").effective("keep").resume().take_up(Resume()).answer({"status": "resumed"})
    assert log.close("stalled").holds(ID)


def test_a_second_keep_preempts_nobody():
    log = frozen().take_up(Pause(mode="keep", clear_cache=False))
    violation = log.add(Preempted(request="r1", by=None), Freed(request="r1", head=(0,), tail=())).violation(ID)
    assert said(violation) == (
        "a pause by keep of a paused engine preempted r1",
        "nothing changed but the mode",
        "preempted r1",
    )
    assert [cause.what for cause in violation.cause] == ["pause effective"]


def test_a_second_keep_ends_nobody():
    log = frozen().take_up(Pause(mode="keep", clear_cache=False)).finish("r1", "abort", head=(0,))
    assert log.violation(ID).sentence == "a pause by keep of a paused engine ended r1"


def test_a_second_keep_may_clear_if_it_asks_for_that():
    log = frozen().pause("keep", clear_cache=True).add(Preempted(request="r1", by=None), Freed(request="r1", head=(0,), tail=()))
    assert log.cleared().effective("keep", clear_cache=True).holds(ID)


def test_a_running_engine_is_not_resumed():
    violation = Timeline().take_up(Resume()).add(Resumed()).violation(ID)
    assert said(violation) == ("a running engine was resumed", "a resume while running does nothing", "`resumed`")


def test_a_second_session_is_not_opened():
    log = frozen().take_up(StartWeightUpdate()).add(UpdateStarted()).answer()
    violation = log.take_up(StartWeightUpdate()).add(UpdateStarted()).violation(ID)
    assert said(violation) == ("a weight session was opened while one is open", "the second start refused", "`update_started` twice")
    assert [cause.what for cause in violation.cause] == ["first session opened"]


def test_pause_calls_that_meet_all_return():
    log = Timeline().submit("r1", [20, 21]).admit("r1", [0]).step(("r1", 0, 2), r1=7).pause("wait").pause("wait")
    log.launch(("r1", 2, 1)).land(r1=8).finish("r1", head=(0,)).deliver(r1="length")
    assert log.effective("wait", ops=[2, 3]).close("drained").holds(ID)


def test_pause_calls_that_meet_and_are_forgotten():
    violation = Timeline().pause("wait").pause("wait").effective("wait", ops=[2]).close("drained").violation(ID)
    assert said(violation) == (
        "pause call 1 met others, took effect with them, and never returned",
        "all of calls [1, 2] answered",
        "[2] answered",
    )
