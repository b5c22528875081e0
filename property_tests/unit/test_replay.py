"""Replay: the state at any event, and no log that it cannot read."""

from __future__ import annotations

from functools import reduce
from operator import or_
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.events import (
    Accepted,
    Admitted,
    Allocated,
    AnyEvent,
    Blocked,
    Cleared,
    Committed,
    Event,
    Finished,
    Freed,
    Landed,
    Launched,
    Opened,
    PartReceived,
    PauseEffective,
    PausePending,
    Preempted,
    Relabelled,
    Resumed,
    Sampled,
    Scheduled,
    Stored,
    UpdateFailed,
    UpdateStarted,
)
from harness.invariants import Judge
from harness.operations import (
    Abort,
    FinishWeightUpdate,
    Pause,
    Prompt,
    ResetPrefixCache,
    StartWeightUpdate,
    Submit,
    SwapWeights,
    UpdateWeights,
    to_data,
)
from harness.replay import NEVER, Replay, Weights, replay
from harness.state import RequestState

from .invariants.logs import NEW_WEIGHTS, Timeline

PROMPT = [20, 21, 22, 23, 24]
PART = PartReceived(part=1, of=1, tensors=1, bytes=4)


def running() -> Timeline:
    """r1 holds block 0, full and published, and block 1; its first token is out."""
    log = Timeline().submit("r1", PROMPT).admit("r1", [0, 1], stored=[(0, 0)])
    return log.step(("r1", 0, 5), r1=7)


def shared() -> Timeline:
    """r2 shares block 0 and holds block 2."""
    return running().submit("r2", PROMPT).admit("r2", [2], hit=[0]).step(("r1", 5, 1), ("r2", 4, 1), r1=8, r2=7)


def of(log: Timeline, until: int | None = None) -> Replay:
    return replay(log.entries, until)


def test_an_empty_engine():
    state = of(Timeline(num_blocks=3)).state()
    assert (state.running, state.waiting, state.blocked, state.digests) == ((), (), (), ())
    assert (state.references, state.free) == ((0, 0, 0), (0, 1, 2))
    assert (state.pause_mode, state.pause_pending, state.weight_version) == (None, False, "default")
    assert (state.update_open, state.out_of_service) == (False, False)


def test_requests_as_the_engine_sees_them():
    state = of(shared().submit("r3", [30])).state()
    assert state.running == (
        RequestState(
            id="r1",
            status="running",
            num_prompt_tokens=5,
            output=(7, 8),
            num_computed_tokens=6,
            num_preemptions=0,
            blocks=(0, 1),
            parked=False,
        ),
        RequestState(
            id="r2",
            status="running",
            num_prompt_tokens=5,
            output=(7,),
            num_computed_tokens=5,
            num_preemptions=0,
            blocks=(0, 2),
            parked=False,
        ),
    )
    assert [(request.id, request.status, request.blocks) for request in state.waiting] == [("r3", "waiting", ())]
    assert (state.references, state.digests, state.free) == ((2, 1, 1, 0, 0, 0, 0, 0), ((0,),), (3, 4, 5, 6, 7))


def test_the_state_can_be_read_at_any_event():
    log = running()
    launched = log.last(Launched)
    assert of(log, until=launched - 1).state().running[0].num_computed_tokens == 0
    assert of(log, until=launched).state().running[0].num_computed_tokens == 5
    assert of(log, until=launched).flights.keys() == {1}
    assert of(log, until=launched + 1).state().running[0].output == (7,)
    assert of(log, until=launched + 1).requests["r1"].delivered == []
    assert of(log).requests["r1"].delivered == [7]


def test_a_token_in_flight_is_a_placeholder_until_its_step_lands():
    log = running().launch(("r1", 5, 1)).launch(("r1", 6, 1))
    events = range(log.last(Launched) - 2, len(log.entries))
    assert [of(log, until=seq).state().running[0].num_output_placeholders for seq in events] == [0, 1, 2]
    log.add(Landed(step=2, sampled=(Sampled("r1", 8),)))
    (r1,) = of(log).state().running
    assert (r1.output, r1.num_computed_tokens, r1.num_output_placeholders) == ((7, 8), 7, 1)


def test_a_preemption_leaves_no_placeholder_and_the_token_in_flight_is_appended():
    log = running().launch(("r1", 5, 1)).add(Preempted(request="r1", by="r1"), Freed(request="r1", head=(1,), tail=(0,)))
    assert of(log).state().waiting[0].num_output_placeholders == 0
    (r1,) = of(log.add(Landed(step=2, sampled=(Sampled("r1", 8),)))).state().waiting
    assert (r1.output, r1.num_computed_tokens, r1.num_output_placeholders) == ((7, 8), 0, 0)


def test_a_token_belongs_to_the_request_that_its_step_was_launched_for():
    log = running().launch(("r1", 5, 1)).abort("r1", head={"r1": (1,)}).submit("r1", PROMPT)
    log.add(Landed(step=2, sampled=(Sampled("r1", 8),)))
    assert of(log).state().waiting[0].output == ()


def test_preempted_requests_stand_at_the_front_and_keep_their_tokens():
    log = shared().submit("r3", [30])
    for id, blocks in (("r2", (2,)), ("r1", (1,))):
        log.add(Preempted(request=id, by=None), Freed(request=id, head=blocks, tail=(0,) if id == "r1" else ()))
    state = of(log).state()
    assert [(request.id, request.status, request.num_preemptions) for request in state.waiting] == [
        ("r1", "preempted", 1),
        ("r2", "preempted", 1),
        ("r3", "waiting", 0),
    ]
    assert [(request.output, request.num_computed_tokens, request.blocks) for request in state.waiting[:2]] == [
        ((7, 8), 0, ()),
        ((7,), 0, ()),
    ]
    assert (state.free, state.digests) == ((1, 2, 3, 4, 5, 6, 7, 0), ((0,),))


def test_a_clear_takes_the_digests_and_keeps_the_order_of_the_queue():
    log = running().abort("r1").add(Freed(request="r1", head=(1,), tail=(0,)))
    assert of(log).state().digests == ((0,),)
    state = of(log.reset()).state()
    assert (state.digests, state.free) == ((), (1, 2, 3, 4, 5, 6, 7, 0))


def test_a_refused_clear_changes_nothing():
    assert of(running().add(Cleared(tier="device", success=False, empty=False))).state() == of(running()).state()


def test_evicted_blocks_lose_their_digest_and_equals_keep_theirs():
    log = running().submit("r2", PROMPT).admit("r2", [2, 3], stored=[(2, 0)])
    assert of(log).state().digests == ((0, 2),)
    log.abort("r1").add(Freed(request="r1", head=(1,), tail=(0,)))
    log.submit("r3", range(30, 50)).admit("r3", [1, 4, 5, 6, 7, 0], evicted=[0])
    assert of(log).state().digests == ((2,),)


def test_late_requests_are_parked_until_resume():
    log = running().pause("keep").effective("keep").submit("r2", [30], parked=True)
    state = of(log).state()
    assert (state.pause_mode, state.pause_pending, state.waiting[0].parked) == ("keep", False, True)
    state = of(log.resume()).state()
    assert (state.pause_mode, state.waiting[0].parked) == (None, False)


def test_a_later_wait_unparks():
    log = running().pause("wait").submit("r2", [30], parked=True)
    assert of(log).state().waiting[0].parked
    state = of(log.pause("wait")).state()
    assert (state.pause_mode, state.pause_pending, state.waiting[0].parked) == ("wait", True, False)


def out_of_service() -> Timeline:
    """r1 came after an update failed."""
    return Timeline().add(UpdateStarted(), UpdateFailed(phase="update", wrote=True, why="broke")).submit("r1", [30], parked=True)


def test_coming_back_into_service_unparks_unless_paused():
    assert of(out_of_service()).state().out_of_service
    assert not of(out_of_service().swap("v2")).state().waiting[0].parked
    assert of(out_of_service().pause("keep").effective("keep").swap("v2")).state().waiting[0].parked


def test_blocked_requests_stand_in_front_until_they_are_accepted():
    log = Timeline().pause("keep").effective("keep")
    log.take_up(Submit(id="r1", prompt=Prompt(tokens=(20, 21)))).add(Blocked(request="r1")).answer({"state": "blocked"})
    log.take_up(Submit(id="r1", prompt=Prompt(tokens=(99,)))).refuse("invalid")
    state = of(log).state()
    assert (state.blocked, state.waiting) == (("r1",), ())
    log.add(Resumed(), Accepted(request="r1", parked=False))
    state = of(log).state()
    assert (state.blocked, [request.id for request in state.waiting]) == ((), ["r1"])
    assert of(log).requests["r1"].prompt == (20, 21)


def test_a_reused_id_is_a_new_request():
    log = running().abort("r1", head={"r1": (1,)}).submit("r1", [30])
    request = of(log).requests["r1"]
    assert (request.prompt, request.output, request.status) == ((30,), [], "waiting")


@pytest.mark.parametrize(
    ("events", "epoch"),
    [
        ((UpdateStarted(),), 0),
        ((UpdateStarted(), PART), 1),
        ((UpdateStarted(), PART, PART, Committed(version="v2")), 1),
        ((UpdateStarted(), Committed(version="v2")), 0),
        ((UpdateStarted(), UpdateFailed(phase="update", wrote=True, why="")), 1),
        ((UpdateStarted(), PART, UpdateFailed(phase="finish", wrote=True, why="")), 1),
        ((UpdateStarted(), UpdateFailed(phase="finish", wrote=False, why="")), 0),
        ((UpdateStarted(), UpdateFailed(phase="update", wrote=True, why=""), UpdateStarted(), PART), 2),
        ((Relabelled(version="v2"),), 0),
    ],
)
def test_the_epoch_rises_at_the_first_byte_of_a_session(events: tuple[Event, ...], epoch: int):
    assert of(Timeline().add(*events)).epoch == epoch


def test_a_failed_update_leaves_the_label_and_closes_the_session():
    state = of(Timeline().add(UpdateStarted(), PART, UpdateFailed(phase="finish", wrote=True, why=""))).state()
    assert (state.weight_version, state.update_open, state.out_of_service) == ("default", False, True)


def test_a_failure_before_the_first_byte_leaves_the_session_open():
    log = Timeline().take_up(StartWeightUpdate()).add(UpdateStarted()).answer()
    log.take_up(FinishWeightUpdate(fails=True)).add(UpdateFailed(phase="finish", wrote=False, why="")).refuse("failed")
    assert of(log).state().update_open


def test_a_swap_that_is_refused_leaves_no_session_open():
    log = Timeline().take_up(SwapWeights(source=NEW_WEIGHTS)).add(UpdateStarted(), UpdateFailed(phase="update", wrote=False, why=""))
    state = of(log.refuse("failed")).state()
    assert (state.update_open, state.out_of_service) == (False, False)


def test_a_swap_refused_for_an_open_session_leaves_that_open():
    log = Timeline().take_up(StartWeightUpdate()).add(UpdateStarted()).answer()
    assert of(log.take_up(SwapWeights(source=NEW_WEIGHTS)).refuse("conflict")).state().update_open


def test_tokens_know_the_weights_that_sampled_them():
    log = running().pause("keep").effective("keep").swap("v2").resume().step(("r1", 5, 1), r1=8)
    request = of(log).requests["r1"]
    assert [request.sampling_weights(index) for index in (0, 1)] == [Weights("default", 0), Weights("v2", 1)]
    assert request.spans() == (("default", 0, 1), ("v2", 1, 2))
    with pytest.raises(IndexError, match="r1 has 2 output tokens, got index 2"):
        request.sampling_weights(2)


def test_equal_labels_join_in_a_span_and_stay_apart_in_epochs():
    log = running().pause("keep").effective("keep").swap("default").resume().step(("r1", 5, 1), r1=8)
    request = of(log).requests["r1"]
    assert request.spans() == (("default", 0, 2),)
    assert request.sampling_weights(1).epoch == 1


def test_kv_entries_know_the_epoch_that_wrote_them():
    log = running().pause("keep").effective("keep").swap("v2").resume().step(("r1", 5, 1), r1=8)
    state = of(log)
    assert (state.kv_epochs(0), state.kv_epochs(1), state.kv_epochs(2)) == ((0, 0, 0, 0), (0, 1, None, None), ())


def test_an_allocated_block_forgets_what_was_written():
    log = running().abort("r1", head={"r1": (1, 0)}).submit("r2", [30]).admit("r2", [1])
    assert of(log).kv_epochs(1) == (None,) * 4


def test_the_oldest_entry_attended_to_is_that_of_the_hit():
    log = running()
    first = log.last(Launched)
    log.submit("r2", PROMPT).admit("r2", [2], hit=[0]).step(("r2", 4, 1), r2=7)
    assert of(log).requests["r2"].oldest_write == first
    log.add(Preempted(request="r2", by=None), Freed(request="r2", head=(2,), tail=()))
    assert of(log).requests["r2"].oldest_write == NEVER


def test_tokens_of_a_request_run_from_the_prompt_into_the_output():
    request = of(running()).requests["r1"]
    assert (request.tokens(3, 6), request.tokens(0, 2), request.tokens(5, 9)) == ((23, 24, 7), (20, 21), (7,))


def test_calls_are_open_until_they_return():
    log = running().pause("wait")
    state = of(log)
    assert list(state.calls) == list(state.pauses) == [2]
    assert state.calls[2].operation == Pause(mode="wait", clear_cache=False)
    state = of(log.answer({"status": "paused"}, op=2))
    assert (state.calls, state.pauses) == ({}, {})


def test_nothing_may_run_from_an_effective_pause_to_resume_or_wait():
    log = running().pause("keep").effective("keep")
    effective = log.last(PauseEffective)
    assert of(log).stopped_since == effective
    assert of(log.add(PausePending(mode="keep", clear_cache=False))).stopped_since == effective
    assert of(log.add(PausePending(mode="wait", clear_cache=False))).stopped_since == NEVER


def test_a_log_of_a_lower_level_has_no_blocks():
    state = of(Timeline(level=1).submit("r1", [20])).state()
    assert (state.references, state.digests, state.free) == ((), (), ())


def test_of_several_writers_the_one_that_shows_most_counts():
    log = Timeline(level=0)
    log.add(msgspec.structs.replace(Timeline(level=2, num_blocks=3).entries[0].event, rank=0))
    assert (of(log).level, of(log).state().free) == (2, (0, 1, 2))


# Logs that no right engine could have written.

IDS = st.sampled_from(["r1", "r2"])
NUMBERS = st.integers(-1, 6)
OPERATIONS: list[dict[str, Any]] = [
    {"unheard_of": {}},
    to_data(Submit(id="r1", prompt=Prompt(tokens=(20, 21, 22, 23, 24)))),
    to_data(Submit(id="r2", prompt=Prompt(tokens=(20, 21, 22, 23, 24)), cache_salt="s")),
    to_data(Abort(ids=("r1", "r9"))),
    to_data(Abort(ids="all")),
    *(to_data(Pause(mode=mode, clear_cache=clear)) for mode in ("abort", "wait", "keep") for clear in (True, False)),
    to_data(ResetPrefixCache()),
    to_data(StartWeightUpdate(allow_unpaused=True)),
    to_data(UpdateWeights(source=NEW_WEIGHTS)),
    to_data(SwapWeights(source=NEW_WEIGHTS)),
]


def any_of(hint: Any) -> st.SearchStrategy[Any]:
    """Small values of a field's type."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (Union, UnionType):
        return reduce(or_, map(any_of, arguments))
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return st.lists(any_of(arguments[0]), max_size=3).map(tuple)
        return st.tuples(*map(any_of, arguments))
    if origin is dict:
        return st.sampled_from(OPERATIONS)
    if hasattr(hint, "_fields"):
        return st.builds(hint, **{name: any_of(field) for name, field in get_type_hints(hint).items()})
    return {str: IDS, int: NUMBERS, bool: st.booleans(), NoneType: st.none()}[hint]


EVENTS = st.one_of(
    st.builds(kind, **{name: any_of(hint) for name, hint in get_type_hints(kind).items() if name in kind.__struct_fields__})
    for kind in get_args(AnyEvent)
    if kind is not Opened
)


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENTS, max_size=40))
def test_every_log_replays_and_is_judged(events: list[Event]):
    entries = shared().add(*events).entries
    judge = Judge()
    judge.feed(entries)
    judge.finish()
    assert replay(entries).state() == judge.replay.state()


def test_events_about_unknown_requests_have_their_most_plausible_effect():
    log = Timeline().add(Allocated(request="r9", blocks=(0,), evicted=()), Admitted(request="r9", life=1, computed=0))
    log.add(Launched(step=1, batch=(Scheduled("r9", 0, 3), Scheduled("r8", 0, 3))), Stored(request="r7", blocks=((0, 0),)))
    log.add(Finished(request="r6", reason="stop", prompt_tokens=1, output_tokens=0, spans=()), Freed(request="r5", head=(), tail=()))
    state = of(log).state()
    assert [(request.id, request.num_computed_tokens, request.blocks) for request in state.running] == [("r9", 3, (0,))]
    assert state.waiting == ()
