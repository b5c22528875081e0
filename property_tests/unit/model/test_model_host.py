"""The host tier: what is copied there and when, what comes back, and whose weights it is of."""

from __future__ import annotations

import pytest

from harness.events import Admitted, Allocated, Cleared, Hit, Loaded, Offloaded, Stored
from harness.model.host import Content, HostTier
from harness.operations import ResetPrefixCache

ONE = list(range(1, 11))
"""10 tokens: two full blocks of 4, and two."""
OTHER = list(range(50, 64))


def run(talk, request: str, prompt: list[int], max_tokens: int = 1) -> list:
    return [*talk.submit(request, prompt, max_tokens=max_tokens), *talk.drain()]


def host(talk) -> tuple[int, ...]:
    return talk.model.state().host


@pytest.fixture
def small(engine):
    """4 blocks and 4 slots; r1 was here: blocks 0 and 1 are cached."""
    talk = engine(num_blocks=4, max_model_len=16, host_blocks=4)
    run(talk, "r1", ONE)
    return talk


def test_evicted_blocks_are_copied_in_the_order_of_the_allocation(small, only):
    events = run(small, "r2", OTHER)
    assert only(events, Allocated, Offloaded, Loaded, Stored, Admitted)[:2] == [
        Allocated(request="r2", blocks=(2, 3, 1, 0), evicted=(1, 0)),
        Offloaded(blocks=((1, 0), (0, 1))),
    ]
    assert host(small) == (0, 1)


def test_copies_come_back_into_the_first_blocks_of_the_allocation_and_count_as_computed(small, only):
    run(small, "r2", OTHER)
    events = run(small, "r3", ONE)
    (allocated,) = only(events, Allocated)
    assert only(events, Hit) == []
    assert only(events, Loaded) == [Loaded(request="r3", blocks=((1, allocated.blocks[0]), (0, allocated.blocks[1])))]
    assert only(events, Stored)[0].blocks == ((allocated.blocks[0], 0), (allocated.blocks[1], 1)), "published under their old labels"
    assert only(events, Admitted) == [Admitted(request="r3", life=1, computed=8)]
    kinds = [type(event) for event in only(events, Allocated, Offloaded, Loaded, Stored, Admitted)]
    assert kinds == [Allocated, Offloaded, Loaded, Stored, Admitted]


def test_the_run_of_copies_follows_that_of_hits(engine, only):
    talk = engine(num_blocks=5, max_model_len=20, host_blocks=4)
    run(talk, "r1", ONE)
    run(talk, "r2", list(range(70, 83)))
    assert host(talk) == (0,), "block 1, the last of r1's prefix, was evicted alone"
    events = run(talk, "r3", ONE)
    assert only(events, Hit) == [Hit(request="r3", blocks=(0,))]
    assert [slot for loaded in only(events, Loaded) for slot, _ in loaded.blocks] == [0]
    assert only(events, Admitted) == [Admitted(request="r3", life=1, computed=8)]


def test_what_is_on_the_host_already_is_not_copied_again(small, only):
    run(small, "r2", OTHER)
    run(small, "r3", ONE)
    offloaded = [slot for event in only(run(small, "r4", OTHER), Offloaded) for _, slot in event.blocks]
    assert 0 not in offloaded and 1 not in offloaded
    assert len(set(host(small))) == len(host(small))


def test_the_slot_used_longest_ago_is_given_up_and_loading_is_a_use():
    tier = HostTier(2)
    assert [tier.keep(Content(label, ()), sparing=()) for label in (7, 8)] == [0, 1]
    tier.load(0)
    assert tier.keep(Content(9, ()), sparing=()) == 1
    assert (tier.find(7), tier.find(8), tier.find(9)) == (0, None, 1)


def test_slots_that_are_being_loaded_are_spared():
    tier = HostTier(2)
    for label in (7, 8):
        tier.keep(Content(label, ()), sparing=())
    assert tier.keep(Content(9, ()), sparing=(0,)) == 1
    assert tier.keep(Content(10, ()), sparing=(0, 1)) is None
    assert tuple(tier.copies) == (0, 1)


def test_after_a_clear_slots_are_taken_from_the_first():
    tier = HostTier(2)
    for label in (7, 8):
        tier.keep(Content(label, ()), sparing=())
    tier.clear()
    assert tier.find(7) is None
    assert tier.keep(Content(7, ()), sparing=()) == 0


def test_a_clear_and_a_reset_empty_both_tiers_and_say_so(small, only):
    run(small, "r2", OTHER)
    assert only(small.pause("keep", clear_cache=True), Cleared) == [
        Cleared(tier=tier, success=True, empty=True) for tier in ("device", "host")
    ]
    assert host(small) == ()
    small.resume()
    run(small, "r3", ONE)
    run(small, "r4", OTHER)
    assert host(small)
    assert [event.tier for event in only(small.call(ResetPrefixCache()), Cleared)] == ["device", "host"]
    assert host(small) == ()
    assert not only(run(small, "r5", ONE), Loaded)


def test_a_refused_reset_touches_neither_tier(small, only):
    run(small, "r2", OTHER)
    small.submit("r3", ONE, max_tokens=3)
    small.step()
    before = host(small)
    assert only(small.call(ResetPrefixCache()), Cleared) == [Cleared(tier="device", success=False, empty=False)]
    assert host(small) == before


def test_without_a_host_tier_nothing_is_said_of_one(engine, only):
    talk = engine(num_blocks=4, max_model_len=16)
    events = [*run(talk, "r1", ONE), *run(talk, "r2", OTHER), *run(talk, "r3", ONE), *talk.pause("keep", clear_cache=True)]
    assert not only(events, Offloaded, Loaded)
    assert [event.tier for event in only(events, Cleared)] == ["device"]


def test_a_copy_keeps_the_epochs_of_its_entries(small, only):
    run(small, "r2", OTHER)
    small.pause("keep")
    small.swap("v2")
    small.resume()
    small.submit("r3", ONE, max_tokens=2)
    small.step()
    assert small.model.kv_epochs("r3") == (0,) * 8 + (1, 1)


def test_room_for_loaded_blocks_is_counted_as_for_computed_ones(engine, only):
    """R11: hits need no block of the free queue, loaded copies do."""
    talk = engine(num_blocks=4, max_model_len=16, host_blocks=4)
    run(talk, "r1", ONE)
    run(talk, "r2", OTHER)
    talk.submit("long", list(range(80, 87)), max_tokens=6)
    talk.step()
    talk.submit("r3", ONE)
    assert not only(talk.step(), Admitted), "two blocks are free, three are wanted, two of which would be loaded"
