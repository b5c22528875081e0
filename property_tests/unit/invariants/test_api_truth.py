"""api-truth: what is answered is what was done."""

from __future__ import annotations

import pytest

from harness.events import (
    Asleep,
    Awake,
    Cleared,
    Committed,
    Event,
    Finished,
    PartReceived,
    PauseEffective,
    PausePending,
    Relabelled,
    Resumed,
    UpdateStarted,
)
from harness.operations import (
    Abort,
    FinishWeightUpdate,
    IsPaused,
    Pause,
    Prompt,
    ResetPrefixCache,
    Resume,
    StartWeightUpdate,
    Submit,
    SwapWeights,
    UpdateWeights,
    UpdateWeightVersion,
)

from .logs import NEW_WEIGHTS, Timeline, said

ID = "api-truth"


def running() -> Timeline:
    return Timeline().submit("r1", [20, 21]).admit("r1", [0]).step(("r1", 0, 2), r1=7)


def ended_by_itself(log: Timeline) -> Timeline:
    return log.launch(("r1", 2, 1)).land(r1=8).finish("r1", head=(0,)).deliver(r1="length")


def test_calls_that_do_what_they_answer():
    log = running().pause("keep").effective("keep").swap("v2").resume().abort("r1", head={"r1": (0,)}).reset()
    assert log.close().holds(ID)


def test_an_abort_ends_everyone_that_it_names():
    violation = running().take_up(Abort(ids=("r1",))).answer({"aborted": 1}).violation(ID)
    assert said(violation) == ("abort (call 2) did not end everyone", "[r1] ended", "[r1] live")
    assert [cause.what for cause in violation.cause] == ["abort taken up"]


def test_an_abort_of_all_reaches_those_held_in_front():
    log = Timeline().take_up(Submit(id="r1", prompt=Prompt(tokens=(20,)))).held("r1").answer({"state": "blocked"})
    violation = log.take_up(Abort(ids="all")).answer({"aborted": 0}).violation(ID)
    assert said(violation) == ("abort (call 2) did not end everyone", "[r1] ended", "[r1] live")


def test_an_abort_counts_whom_it_ended():
    violation = running().take_up(Abort(ids=("r1", "r9"))).finish("r1", "abort", head=(0,)).answer({"aborted": 2}).violation(ID)
    assert said(violation) == ("abort (call 2) counted others than it ended", "aborted 1: [r1]", "aborted 2")


def test_an_abort_of_nobody_is_no_lie():
    assert ended_by_itself(running()).take_up(Abort(ids=("r1",))).answer({"aborted": 0}).holds(ID)


def test_nobody_is_aborted_unasked():
    violation = running().finish("r1", "abort", head=(0,)).violation(ID)
    assert said(violation) == (
        "r1 was aborted, and nobody asked for that",
        "an abort call that names it, or a pause(abort), since it came",
        "finish reason abort",
    )


def test_an_abort_of_an_earlier_request_of_that_id_does_not_count():
    log = ended_by_itself(running()).take_up(Abort(ids=("r1",))).answer({"aborted": 0})
    assert log.submit("r1", [20]).finish("r1", "abort").violation(ID).sentence == "r1 was aborted, and nobody asked for that"


def test_an_abort_pause_asks_for_all_that_are_there():
    assert running().pause("abort").finish("r1", "abort", head=(0,)).effective("abort").holds(ID)


def test_a_reset_that_succeeds_reset_something():
    violation = running().take_up(ResetPrefixCache()).answer({"status": "reset"}).violation(ID)
    assert said(violation) == (
        "reset_prefix_cache (call 2) succeeded and nothing was reset",
        "`cleared` with success before the answer",
        "none",
    )


def test_a_reset_that_failed_is_no_success():
    log = running().take_up(ResetPrefixCache()).add(Cleared(tier="device", success=False, empty=False))
    assert log.answer({"status": "reset"}).violation(ID).sentence == "reset_prefix_cache (call 2) succeeded and nothing was reset"


def test_blocks_are_not_missed_in_a_log_that_shows_none():
    assert Timeline(level=1).take_up(ResetPrefixCache()).answer({"status": "reset"}).holds(ID)


def test_a_resume_that_succeeds_resumed():
    violation = running().pause("keep").effective("keep").take_up(Resume()).answer({"status": "resumed"}).violation(ID)
    assert said(violation) == (
        "resume (call 3) succeeded and the engine is paused",
        "`resumed` before the answer",
        "none since the pause",
    )


def test_a_resume_may_be_overtaken_by_a_pause():
    log = running().pause("keep").effective("keep").take_up(Resume()).add(Resumed())
    assert log.pause("keep").answer({"status": "resumed"}, op=3).effective("keep", ops=[4]).holds(ID)


def test_weight_calls_show_their_effect():
    for operation, effect in (
        (StartWeightUpdate(), "update_started"),
        (UpdateWeights(source=NEW_WEIGHTS), "part_received"),
        (FinishWeightUpdate(version="v2"), "committed"),
        (SwapWeights(source=NEW_WEIGHTS, version="v2"), "committed"),
        (UpdateWeightVersion(version="v2"), "relabelled"),
    ):
        violation = running().pause("keep").effective("keep").take_up(operation).answer().violation(ID)
        assert said(violation) == (f"{operation.verb} (call 3) succeeded without its effect", f"`{effect}` before the answer", "none")


def test_a_version_is_answered_as_it_was_asked_for():
    log = Timeline().take_up(UpdateWeightVersion(version="v2")).add(Relabelled(version="v2"))
    violation = log.answer({"weight_version": "v1"}).violation(ID)
    assert said(violation) == ("update_weight_version (call 1) succeeded under another version", "v2", "v1")


def test_an_update_writes_something():
    log = Timeline(device="cpu").pause("keep").effective("keep").take_up(SwapWeights(source=NEW_WEIGHTS, version="v2"))
    violation = log.add(UpdateStarted(), PartReceived(part=1, of=1, tensors=0, bytes=0), Committed(version="v2")).violation(ID)
    assert said(violation) == ("a weight update succeeded that wrote nothing", "at least one tensor written by its parts", "0 tensors")


def test_an_engine_without_weights_writes_none():
    log = Timeline().pause("keep").effective("keep").take_up(SwapWeights(source=NEW_WEIGHTS, version="v2"))
    assert log.add(UpdateStarted(), PartReceived(part=1, of=1, tensors=0, bytes=0), Committed(version="v2")).answer().holds(ID)


def test_a_refused_call_does_nothing():
    violation = Timeline().take_up(UpdateWeightVersion(version="v2")).add(Relabelled(version="v2")).refuse("conflict").violation(ID)
    assert said(violation) == (
        "update_weight_version (call 1) was refused (conflict), and did something",
        "no effect",
        "set the version v2",
    )


def test_what_a_step_did_is_not_laid_at_a_refusal():
    log = running().take_up(Pause(mode="wait"), op=8)
    assert ended_by_itself(log).refuse("conflict", op=8).holds(ID)


def test_an_update_that_failed_failed():
    violation = Timeline().take_up(UpdateWeights(source=NEW_WEIGHTS)).refuse("failed").violation(ID)
    assert said(violation) == ("update_weights (call 1) failed, and no failure of an update was seen", "`update_failed`", "none")


def test_a_submission_says_what_became_of_it():
    log = running().pause("keep").effective("keep").take_up(Submit(id="r2", prompt=Prompt(tokens=(20,))))
    violation = log.taken_on("r2", parked=True).answer({"state": "queued"}).violation(ID)
    assert said(violation) == ("submit (call 3) answered another state than r2 was taken on in", "parked", "queued")


def test_every_call_returns():
    violation = running().take_up(ResetPrefixCache()).close("paused").violation(ID)
    assert said(violation) == ("reset_prefix_cache (call 2) never returned", "an answer or an error", "no `returned`")


def test_a_call_under_way_when_the_run_was_interrupted_is_none():
    assert running().take_up(ResetPrefixCache()).close("interrupted").holds(ID)


def test_the_end_of_a_request_that_nobody_handed_in_is_left_to_others():
    assert running().add(Finished(request="r9", reason="length", prompt_tokens=1, output_tokens=0, spans=())).holds(ID)


def test_a_call_is_answered_once():
    violation = running().take_up(IsPaused()).answer().answer().violation(ID)
    assert said(violation) == ("call 2 was answered and was not open", "one answer to each call", "another")


UNASKED: list[tuple[Event, str, str]] = [
    (Resumed(), "resumed", "resume or wake_up or finish_weight_update or swap_weights"),
    (PausePending(mode="keep", clear_cache=False), "paused", "pause or sleep"),
    (Asleep(level=1, tags=("kv_cache", "weights")), "fell asleep", "sleep"),
    (Awake(tags=()), "woke up", "wake_up"),
    (UpdateStarted(), "opened a weight session", "start_weight_update or swap_weights"),
    (PartReceived(part=1, of=1, tensors=1, bytes=4), "wrote weights", "update_weights or swap_weights"),
    (Committed(version="v2"), "committed v2", "finish_weight_update or swap_weights"),
    (Relabelled(version="v2"), "set the version v2", "update_weight_version"),
]


@pytest.mark.parametrize(("event", "did", "call"), UNASKED, ids=[did for _, did, _ in UNASKED])
def test_nothing_is_done_unasked(event: Event, did: str, call: str):
    violation = running().take_up(IsPaused()).add(event).violation(ID)
    assert said(violation) == (
        f"the engine {did}, and nobody asked for that",
        f"a call of {call} that is taken up and not answered",
        "none",
    )


def test_an_engine_that_comes_back_into_service_does_not_resume():
    log = running().pause("keep").effective("keep").swap("v2").add(Resumed())
    assert log.violation(ID).sentence == "the engine resumed, and nobody asked for that"


def test_a_call_that_was_answered_is_over():
    log = running().pause("keep").effective("keep").take_up(Resume()).refuse("conflict").add(Resumed())
    assert log.violation(ID).sentence == "the engine resumed, and nobody asked for that"


def test_a_refused_resume_resumes_nothing():
    log = running().pause("keep").effective("keep").take_up(Resume()).add(Resumed()).refuse("conflict")
    assert log.violation(ID).sentence == "resume (call 3) was refused (conflict), and did something"


def test_a_pause_takes_effect_once():
    log = running().pause("keep").effective("keep").add(PauseEffective(mode="keep", clear_cache=False))
    assert said(log.violation(ID)) == ("a pause took effect, and none was pending", "`pause_pending` before", "a pause of mode keep")


def test_a_refused_pause_pauses_nothing_though_a_step_came_before_its_answer():
    log = running().pause("keep").step(("r1", 2, 1), r1=8).effective("keep", ops=()).refuse("failed")
    assert said(log.violation(ID)) == ("pause (call 2) was refused (failed), and did something", "no effect", "paused")


def test_nobody_is_aborted_by_a_pause_that_a_resume_ended():
    log = running().take_up(Pause(mode="abort", clear_cache=False)).add(PausePending(mode="abort", clear_cache=False))
    log.refuse("superseded").resume().finish("r1", "abort", head=(0,))
    assert log.violation(ID).sentence == "r1 was aborted, and nobody asked for that"


def test_frozen_requests_are_not_aborted_after_resume():
    log = running().pause("keep").effective("keep").resume().finish("r1", "abort", head=(0,))
    assert log.violation(ID).sentence == "r1 was aborted, and nobody asked for that"
