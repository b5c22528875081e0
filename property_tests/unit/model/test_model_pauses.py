"""What each pause mode does, and what happens when calls meet, as timelines of events."""

from __future__ import annotations

import msgspec
import pytest

from harness.events import (
    Accepted,
    Admitted,
    Allocated,
    Blocked,
    Cleared,
    Delivered,
    Failure,
    Finished,
    Freed,
    Landed,
    Launched,
    Output,
    PauseEffective,
    PausePending,
    Preempted,
    Received,
    Resumed,
    Returned,
    Sampled,
    Scheduled,
    Stored,
    VersionSpan,
    comparable,
)
from harness.operations import IsPaused, ResetPrefixCache

PAUSED = {"status": "paused"}
CLEARED = Cleared(tier="device", success=True, empty=True)


def returned(op, answer):
    return Returned(op=op, answer=answer, error=None)


def superseded(op):
    return Returned(op=op, answer=None, error=Failure("superseded", ""))


def without_messages(events):
    return [comparable(event) for event in events]


def aborted(request, prompt_tokens, output_tokens):
    spans = (VersionSpan("default", 0, output_tokens),) if output_tokens else ()
    return Finished(request=request, reason="abort", prompt_tokens=prompt_tokens, output_tokens=output_tokens, spans=spans)


@pytest.fixture
def two_running(engine):
    """r1 holds blocks 0 and 1, r2 holds 2 and 3; each has one output token. Calls 0 and 1."""
    engine = engine()
    engine.submit("r1", range(1, 6))
    engine.submit("r2", range(11, 16))
    engine.step()
    return engine


@pytest.fixture
def one_seat(engine):
    """r1 runs with one token of two, r2 waits for one token. Calls 0 and 1."""
    engine = engine(max_num_seqs=1)
    engine.submit("r1", range(1, 6), max_tokens=2)
    engine.submit("r2", range(11, 16), max_tokens=1)
    engine.step()
    return engine


def test_a_request_from_its_submission_to_its_end(engine):
    engine = engine()
    assert engine.submit("r1", (1, 2, 3, 4, 5), max_tokens=2) == [
        Received(op=0),
        Accepted(request="r1", parked=False),
        returned(0, {"state": "queued"}),
    ]
    assert engine.drain() == [
        Allocated(request="r1", blocks=(0, 1), evicted=()),
        Stored(request="r1", blocks=((0, 0),)),
        Admitted(request="r1", life=1, computed=0),
        Launched(step=1, batch=(Scheduled("r1", 0, 5),)),
        Landed(step=1, sampled=(Sampled("r1", 105),)),
        Delivered(outputs=(Output("r1", 0, (105,), None),)),
        Launched(step=2, batch=(Scheduled("r1", 5, 1),)),
        Landed(step=2, sampled=(Sampled("r1", 106),)),
        Finished(request="r1", reason="length", prompt_tokens=5, output_tokens=2, spans=(VersionSpan("default", 0, 2),)),
        Freed(request="r1", head=(1,), tail=(0,)),
        Delivered(outputs=(Output("r1", 1, (106,), "length"),)),
    ]


def test_abort_ends_all_and_hands_their_outputs_over_before_it_is_effective(one_seat):
    assert one_seat.pause("abort", clear_cache=True) == [
        Received(op=2),
        PausePending(mode="abort", clear_cache=True),
        aborted("r1", 5, 1),
        Freed(request="r1", head=(1,), tail=(0,)),
        aborted("r2", 5, 0),
        Delivered(outputs=(Output("r1", 1, (), "abort"), Output("r2", 0, (), "abort"))),
        CLEARED,
        PauseEffective(mode="abort", clear_cache=True),
        returned(2, PAUSED),
    ]
    assert not one_seat.model.has_work()


def test_abort_ends_a_reused_id_in_the_order_of_its_new_submission(one_seat, only):
    one_seat.abort("r1")
    one_seat.submit("r1", (1, 2))
    assert [finished.request for finished in only(one_seat.pause("abort"), Finished)] == ["r2", "r1"]


def test_keep_freezes_where_they_are(two_running):
    before = two_running.model.state()
    assert two_running.pause("keep") == [
        Received(op=2),
        PausePending(mode="keep", clear_cache=False),
        PauseEffective(mode="keep", clear_cache=False),
        returned(2, PAUSED),
    ]
    assert not two_running.model.has_work()
    assert two_running.model.state() == msgspec.structs.replace(before, pause_mode="keep")
    assert two_running.resume() == [Received(op=3), Resumed(), returned(3, {"status": "resumed"})]
    assert two_running.step()[0] == Launched(step=2, batch=(Scheduled("r1", 5, 1), Scheduled("r2", 5, 1)))


def test_keep_with_clear_preempts_from_the_last_to_the_first_and_all_is_prefilled_again(two_running):
    assert two_running.pause("keep", clear_cache=True) == [
        Received(op=2),
        PausePending(mode="keep", clear_cache=True),
        Preempted(request="r2", by=None),
        Freed(request="r2", head=(3,), tail=(2,)),
        Preempted(request="r1", by=None),
        Freed(request="r1", head=(1,), tail=(0,)),
        CLEARED,
        PauseEffective(mode="keep", clear_cache=True),
        returned(2, PAUSED),
    ]
    assert two_running.submit("r3", (1,))[1] == Accepted(request="r3", parked=True)
    assert two_running.waiting == ["r1", "r2", "r3"]
    two_running.resume()
    assert two_running.step()[:7] == [
        Allocated(request="r1", blocks=(1, 3), evicted=()),
        Stored(request="r1", blocks=((1, 0),)),
        Admitted(request="r1", life=2, computed=0),
        Allocated(request="r2", blocks=(4, 5), evicted=()),
        Stored(request="r2", blocks=((4, 1),)),
        Admitted(request="r2", life=2, computed=0),
        Allocated(request="r3", blocks=(6,), evicted=()),
    ]


def test_wait_runs_and_admits_what_was_accepted_before_it_and_parks_the_rest(one_seat):
    assert one_seat.pause("wait", clear_cache=True) == [Received(op=2), PausePending(mode="wait", clear_cache=True)]
    assert one_seat.submit("r3", (1,)) == [Received(op=3), Accepted(request="r3", parked=True), returned(3, {"state": "parked"})]
    assert one_seat.drain() == [
        Launched(step=2, batch=(Scheduled("r1", 5, 1),)),
        Landed(step=2, sampled=(Sampled("r1", 106),)),
        Finished(request="r1", reason="length", prompt_tokens=5, output_tokens=2, spans=(VersionSpan("default", 0, 2),)),
        Freed(request="r1", head=(1,), tail=(0,)),
        Delivered(outputs=(Output("r1", 1, (106,), "length"),)),
        Allocated(request="r2", blocks=(1, 2), evicted=()),
        Stored(request="r2", blocks=((1, 1),)),
        Admitted(request="r2", life=1, computed=0),
        Launched(step=3, batch=(Scheduled("r2", 0, 5),)),
        Landed(step=3, sampled=(Sampled("r2", 105),)),
        Finished(request="r2", reason="length", prompt_tokens=5, output_tokens=1, spans=(VersionSpan("default", 0, 1),)),
        Freed(request="r2", head=(2,), tail=(1,)),
        Delivered(outputs=(Output("r2", 0, (105,), "length"),)),
        CLEARED,
        PauseEffective(mode="wait", clear_cache=True),
        returned(2, PAUSED),
    ]
    assert one_seat.waiting == ["r3"]


def test_while_a_wait_is_pending_the_parked_are_not_admitted_into_free_seats(two_running):
    two_running.pause("wait")
    two_running.submit("late", (1,))
    assert two_running.step()[0] == Launched(step=2, batch=(Scheduled("r1", 5, 1), Scheduled("r2", 5, 1)))


def test_wait_with_nothing_live_is_effective_at_once(engine):
    engine = engine()
    assert engine.pause("wait") == [
        Received(op=0),
        PausePending(mode="wait", clear_cache=False),
        PauseEffective(mode="wait", clear_cache=False),
        returned(0, PAUSED),
    ]


def test_abort_over_a_pending_wait_overrides_and_both_return_in_the_order_of_the_calls(two_running):
    two_running.pause("wait", clear_cache=True)
    assert two_running.pause("abort") == [
        Received(op=3),
        PausePending(mode="abort", clear_cache=True),
        aborted("r1", 5, 1),
        Freed(request="r1", head=(1,), tail=(0,)),
        aborted("r2", 5, 1),
        Freed(request="r2", head=(3,), tail=(2,)),
        Delivered(outputs=(Output("r1", 1, (), "abort"), Output("r2", 1, (), "abort"))),
        CLEARED,
        PauseEffective(mode="abort", clear_cache=True),
        returned(2, PAUSED),
        returned(3, PAUSED),
    ]


def test_keep_over_a_pending_wait_freezes_and_the_wait_fails(two_running):
    two_running.pause("wait", clear_cache=True)
    assert without_messages(two_running.pause("keep")) == [
        Received(op=3),
        superseded(2),
        PausePending(mode="keep", clear_cache=False),
        PauseEffective(mode="keep", clear_cache=False),
        returned(3, PAUSED),
    ]
    assert not two_running.model.has_work()


def test_keep_over_two_waits_fails_both(two_running):
    two_running.pause("wait")
    two_running.pause("wait")
    assert without_messages(two_running.pause("keep"))[1:3] == [superseded(2), superseded(3)]


def test_resume_over_a_pending_wait_resumes_and_the_wait_fails(two_running):
    two_running.pause("wait")
    two_running.submit("late", (1,))
    assert without_messages(two_running.resume()) == [Received(op=4), superseded(2), Resumed(), returned(4, {"status": "resumed"})]
    assert Scheduled("late", 0, 1) in two_running.model.schedule()[-1].batch


def test_wait_joins_a_pending_wait_clear_wins_and_those_parked_in_between_run_too(one_seat, only):
    one_seat.pause("wait")
    one_seat.submit("r3", (1,), max_tokens=1)
    assert one_seat.pause("wait", clear_cache=True) == [Received(op=4), PausePending(mode="wait", clear_cache=True)]
    one_seat.submit("r4", (1,), max_tokens=1)
    events = one_seat.drain()
    assert [finished.request for finished in only(events, Finished)] == ["r1", "r2", "r3"]
    assert events[-4:] == [CLEARED, PauseEffective(mode="wait", clear_cache=True), returned(2, PAUSED), returned(4, PAUSED)]
    assert one_seat.waiting == ["r4"]


def test_wait_over_an_effective_keep_runs_the_frozen_and_the_parked_to_their_end(two_running, only):
    two_running.pause("keep")
    two_running.submit("r3", (1,), max_tokens=1)
    assert two_running.pause("wait") == [Received(op=4), PausePending(mode="wait", clear_cache=False)]
    assert {finished.request: finished.reason for finished in only(two_running.drain(), Finished)} == dict.fromkeys(
        ["r1", "r2", "r3"], "length"
    )


def test_a_clients_abort_of_the_last_one_completes_a_wait_after_its_own_answer(one_seat):
    one_seat.abort("r2")
    one_seat.pause("wait")
    assert one_seat.abort("r1") == [
        Received(op=4),
        aborted("r1", 5, 1),
        Freed(request="r1", head=(1,), tail=(0,)),
        Delivered(outputs=(Output("r1", 1, (), "abort"),)),
        returned(4, {"aborted": 1}),
        PauseEffective(mode="wait", clear_cache=False),
        returned(3, PAUSED),
    ]


def test_a_repeated_abort_ends_those_parked_since(engine):
    engine = engine()
    engine.pause("abort")
    engine.submit("r1", (1, 2))
    assert engine.pause("abort") == [
        Received(op=2),
        PausePending(mode="abort", clear_cache=False),
        aborted("r1", 2, 0),
        Delivered(outputs=(Output("r1", 0, (), "abort"),)),
        PauseEffective(mode="abort", clear_cache=False),
        returned(2, PAUSED),
    ]


def test_keep_over_an_effective_abort_changes_the_mode_and_leaves_the_parked(engine):
    engine = engine()
    engine.pause("abort")
    engine.submit("r1", (1, 2))
    before = engine.model.state()
    engine.pause("keep")
    assert engine.model.state() == msgspec.structs.replace(before, pause_mode="keep")


def test_clear_clears_even_if_the_earlier_pause_did_not(two_running):
    two_running.pause("keep")
    assert CLEARED in two_running.pause("keep", clear_cache=True)
    assert two_running.model.state().digests == ()


def test_resume_while_running_does_nothing(two_running):
    before = two_running.model.state()
    assert two_running.resume() == [Received(op=2), returned(2, {"status": "resumed"})]
    assert two_running.model.state() == before


def test_is_paused_is_true_while_pending(two_running):
    assert two_running.call(IsPaused())[-1] == returned(2, {"is_paused": False})
    two_running.pause("wait")
    assert two_running.model.state().pause_pending
    assert two_running.call(IsPaused())[-1] == returned(4, {"is_paused": True})


def test_blocked_requests_are_accepted_in_order_after_resumed(engine, error):
    engine = engine(late_requests="block")
    engine.pause("keep")
    assert engine.submit("r1", (1,)) == [Received(op=1), Blocked(request="r1"), returned(1, {"state": "blocked"})]
    engine.submit("r2", (2,))
    assert engine.model.state().blocked == ("r1", "r2")
    assert error(engine.submit("r1", (1,))) == "invalid"
    assert engine.pause("wait")[-1] == returned(4, PAUSED), "blocked requests are not live"
    assert engine.resume() == [
        Received(op=5),
        Resumed(),
        Accepted(request="r1", parked=False),
        Accepted(request="r2", parked=False),
        returned(5, {"status": "resumed"}),
    ]
    assert engine.waiting == ["r1", "r2"]


def test_a_pause_with_abort_leaves_blocked_requests_a_clients_abort_ends_them(engine):
    engine = engine(late_requests="block")
    engine.pause("keep")
    engine.submit("r1", (1,))
    engine.pause("abort")
    assert engine.model.state().blocked == ("r1",)
    assert engine.abort("r1") == [
        Received(op=3),
        aborted("r1", 1, 0),
        Delivered(outputs=(Output("r1", 0, (), "abort"),)),
        returned(3, {"aborted": 1}),
    ]


def test_late_requests_are_rejected_under_that_policy_but_invalid_ones_are_invalid(engine, error):
    engine = engine(late_requests="reject")
    engine.pause("keep")
    assert error(engine.submit("r1", (1,))) == "rejected"
    assert error(engine.submit("r1", ())) == "invalid"
    engine.resume()
    assert error(engine.submit("r1", (1,))) is None


def test_a_reset_is_busy_while_blocks_are_held_unless_the_pause_is_effective(two_running):
    two_running.pause("wait")
    assert without_messages(two_running.call(ResetPrefixCache())) == [
        Received(op=3),
        Cleared(tier="device", success=False, empty=False),
        Returned(op=3, answer=None, error=Failure("busy", "")),
    ]
    two_running.pause("keep")
    assert two_running.call(ResetPrefixCache()) == [
        Received(op=5),
        Preempted(request="r2", by=None),
        Freed(request="r2", head=(3,), tail=(2,)),
        Preempted(request="r1", by=None),
        Freed(request="r1", head=(1,), tail=(0,)),
        CLEARED,
        returned(5, {"status": "reset"}),
    ]


def test_a_reset_while_running_succeeds_once_nothing_is_held(two_running):
    two_running.drain()
    assert two_running.call(ResetPrefixCache()) == [Received(op=2), CLEARED, returned(2, {"status": "reset"})]
    assert two_running.model.state().digests == ()
