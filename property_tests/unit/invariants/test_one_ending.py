"""one-ending: every accepted request ends, and once."""

from __future__ import annotations

from harness.events import Accepted, Blocked, Finished
from harness.operations import Prompt, Submit

from .logs import Timeline, said

ID = "one-ending"


def submission(id: str) -> Submit:
    return Submit(id=id, prompt=Prompt(tokens=(20, 21)))


def running() -> Timeline:
    return Timeline().submit("r1", [20, 21]).admit("r1", [0]).step(("r1", 0, 2), r1=7)


def test_one_end_holds():
    assert running().abort("r1", head={"r1": (0,)}).close().holds(ID)


def test_an_id_may_be_used_again_after_its_end():
    log = running().abort("r1", head={"r1": (0,)}).submit("r1", [20, 21])
    assert log.abort("r1").close().holds(ID)


def test_a_blocked_request_may_be_aborted():
    log = Timeline().submit("r2", [20]).abort("r2").take_up(submission("r1")).add(Blocked(request="r1")).answer({"state": "blocked"})
    log.add(Finished(request="r1", reason="abort", prompt_tokens=2, output_tokens=0, spans=()))
    assert log.close().holds(ID)


def test_a_request_that_never_ends():
    violation = running().close().violation(ID)
    assert said(violation) == ("r1 was accepted and never ended", "an end: the run closed as drained", "running, with 1 tokens")
    assert [cause.what for cause in violation.cause] == ["r1 accepted"]


def test_a_parked_request_that_never_ends():
    assert Timeline().submit("r1", [20], parked=True).close().violation(ID).got == "waiting, parked, with 0 tokens"


def test_a_pause_may_leave_requests_live():
    assert running().pause("keep").effective("keep").close("paused").holds(ID)


def test_an_engine_that_only_says_it_is_paused_must_end_them():
    assert running().pause("keep").effective("keep").resume().close("paused").violation(ID).expected == "an end: the run closed as paused"


def test_a_stalled_run_leaves_requests_hanging():
    assert running().close("stalled").violation(ID).expected == "an end: the run closed as stalled"


def test_a_wait_that_stops_before_its_requests_end_leaves_them_hanging():
    log = running().pause("wait").submit("r2", [30], parked=True).close("paused")
    assert log.violation(ID).sentence == "r1 was accepted and never ended"


def test_an_interrupted_run_may_leave_requests_live():
    assert running().close("interrupted").holds(ID)


def test_no_end_after_the_end():
    violation = running().abort("r1", head={"r1": (0,)}).finish("r1", "length").violation(ID)
    assert said(violation) == ("r1 finished twice", "one end, by abort", "another, by length")
    assert [cause.what for cause in violation.cause] == ["r1 finished"]


def test_no_end_of_an_unknown_request():
    log = Timeline().add(Finished(request="r9", reason="stop", prompt_tokens=1, output_tokens=0, spans=()))
    assert said(log.violation(ID)) == ("r9 finished, which was never accepted", "an accepted request", "an end by stop")


def test_no_step_after_the_end():
    violation = running().abort("r1", head={"r1": (0,)}).launch(("r1", 2, 1)).launch(("r1", 3, 1)).violation(ID)
    assert said(violation) == ("r1 was scheduled in step 2 after its end", "live requests only", "r1, which ended by abort")


def test_no_admission_after_the_end():
    log = running().abort("r1", head={"r1": (0,)}).admit("r1", life=2)
    assert log.violation(ID).sentence == "r1 was admitted after its end"


def test_no_step_of_an_unknown_request():
    log = Timeline().launch(("r9", 0, 1))
    assert said(log.violation(ID)) == ("r9 was scheduled in step 1, and never accepted", "live requests only", "r9, unknown")


def test_no_second_request_of_a_live_id():
    violation = running().add(Accepted(request="r1", parked=False)).violation(ID)
    assert said(violation) == (
        "r1 was accepted while a request of that id is live",
        "an error: ids of live requests may not be used again",
        "two requests, of which the first can no longer end",
    )


def test_an_answered_submission_does_not_vanish():
    violation = Timeline().take_up(submission("r1")).answer({"state": "queued"}).violation(ID)
    assert said(violation) == (
        "the answer to r1's submission is not what became of it",
        "taken on, as the call succeeded",
        "neither accepted nor blocked: it vanished",
    )


def test_a_refused_submission_is_not_taken_on():
    log = Timeline().take_up(submission("r1")).add(Accepted(request="r1", parked=False)).refuse("rejected")
    assert said(log.violation(ID))[1:] == ("not taken on: rejected", "taken on")


def test_a_refused_duplicate_leaves_the_first_alone():
    assert running().take_up(submission("r1")).refuse("invalid").holds(ID)


def test_blocked_requests_are_taken_on_by_a_running_engine():
    log = Timeline().take_up(submission("r1")).add(Blocked(request="r1")).answer({"state": "blocked"}).close()
    assert said(log.violation(ID)) == (
        "blocked requests were left in front of a running engine",
        "accepted when it resumed",
        "[r1] blocked",
    )


def test_a_pause_may_leave_requests_blocked():
    log = Timeline().pause("keep").effective("keep").take_up(submission("r1")).add(Blocked(request="r1")).answer({"state": "blocked"})
    assert log.close().holds(ID)


def test_nobody_is_accepted_who_was_not_handed_in():
    log = Timeline().submit("r1", [20]).finish("r1", "abort")
    violation = log.taken_on("r1").violation(ID)
    assert said(violation) == (
        "r1 was accepted, and nobody had handed it in",
        "a submission that was taken up, or a blocked request",
        "one that ended by abort",
    )
