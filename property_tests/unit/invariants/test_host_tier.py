"""The host tier, over the invariants of caches: what comes back from there is one's own, not stale, and gone after a reset."""

from __future__ import annotations

from harness.events import Admitted, Allocated, Cleared, Freed, Loaded, Offloaded, PauseEffective, Preempted, Stored
from harness.replay import replay

from .logs import Timeline, said

EPOCH, LIFE, RESET, MODE = "cache-epoch", "block-lifetime", "reset-truth", "mode-fidelity"
ONE = [20, 21, 22, 23, 24]
"""A full block of 4, and a token."""
OTHER = list(range(30, 38))


def offloaded(slot: int = 0) -> Timeline:
    """r1 was here; r2 took both blocks of the pool, and r1's first is on the host."""
    log = Timeline(num_blocks=2, host_blocks=2).submit("r1", ONE).admit("r1", [0, 1], stored=[(0, 0)]).step(("r1", 0, 5), r1=7)
    log.abort("r1").add(Freed(request="r1", head=(1,), tail=(0,))).submit("r2", OTHER)
    log.add(Allocated(request="r2", blocks=(1, 0), evicted=(0,)), Offloaded(blocks=((0, slot),)))
    return log.add(Stored(request="r2", blocks=((1, 1), (0, 2))), Admitted(request="r2", life=1, computed=0)).step(("r2", 0, 8), r2=7)


def gone(log: Timeline) -> Timeline:
    """r2 ends, and its blocks are cached."""
    return log.abort("r2").add(Freed(request="r2", head=(), tail=(0, 1)))


def returned(log: Timeline) -> Timeline:
    """r3 comes with r1's prompt, and loads its copy."""
    log.submit("r3", ONE).add(Allocated(request="r3", blocks=(0, 1), evicted=(0, 1)), Offloaded(blocks=((0, 1),)))
    log.add(Loaded(request="r3", blocks=((0, 0),)), Stored(request="r3", blocks=((0, 0),)))
    return log.add(Admitted(request="r3", life=1, computed=4)).step(("r3", 4, 1), r3=7)


def test_a_copy_may_come_back():
    log = returned(gone(offloaded()))
    assert all(log.holds(id) for id in (EPOCH, LIFE, RESET))


def test_replay_follows_copies_and_the_epochs_of_their_entries():
    log = gone(offloaded())
    assert replay(log.entries).state().host == (0,)
    log = returned(log.pause("keep").effective("keep").swap("v2").resume())
    assert replay(log.entries).state().host == (1, 0), "least recently used first"
    assert replay(log.entries).kv_epochs(0) == (0, 0, 0, 0)
    assert replay(log.entries).kv_epochs(1) == (1, None, None, None)


# cache-epoch


def test_stale_copies_may_come_back_without_a_clear():
    assert returned(gone(offloaded()).pause("keep").effective("keep").swap("v2").resume()).holds(EPOCH)


def test_a_copy_that_a_clear_left_is_stale():
    log = gone(offloaded()).pause("keep", clear_cache=True).cleared().effective("keep", clear_cache=True).swap("v2").resume()
    log.submit("r3", ONE).add(Allocated(request="r3", blocks=(0, 1), evicted=()), Loaded(request="r3", blocks=((0, 0),)))
    log.add(Stored(request="r3", blocks=((0, 0),)), Admitted(request="r3", life=1, computed=4)).step(("r3", 4, 1), r3=7)
    violation = log.violation(EPOCH)
    assert said(violation) == (
        "r3 loaded the copy in slot 0, whose KV is stale",
        "entries of epoch 1 only, as a clear was promised",
        "the entry at position 0 is of epoch 0",
    )
    assert [cause.what for cause in violation.cause] == ["written in epoch 0", "an empty cache promised", "first byte of epoch 1"]


# block-lifetime


def test_a_load_needs_a_copy():
    log = gone(offloaded()).submit("r3", ONE).add(Allocated(request="r3", blocks=(0, 1), evicted=(0, 1)))
    violation = log.add(Loaded(request="r3", blocks=((1, 0),))).violation(LIFE)
    assert said(violation) == ("r3 loaded slot 1, which holds no copy", "a slot of [0]", "1")


def test_a_request_loads_its_own_contents_only():
    log = gone(offloaded()).submit("r3", [20, 21, 22, 99, 24]).add(Allocated(request="r3", blocks=(0, 1), evicted=(0, 1)))
    assert said(log.add(Loaded(request="r3", blocks=((0, 0),))).violation(LIFE)) == (
        "r3 loaded slot 0, whose digest stands for other contents",
        "tokens [20, 21, 22, 99], salt None, after label None",
        "tokens [20, 21, 22, 23], salt None, after label None",
    )


def test_a_copy_goes_where_it_belongs():
    log = gone(offloaded()).submit("r3", ONE).add(Allocated(request="r3", blocks=(0, 1), evicted=(0, 1)))
    violation = log.add(Loaded(request="r3", blocks=((0, 1),))).violation(LIFE)
    assert said(violation) == ("r3 loaded slot 0 into block 1, where it does not belong", "entry 0 of [0, 1]", "block 1")


def test_only_what_was_just_evicted_is_copied():
    log = gone(offloaded()).add(Offloaded(blocks=((1, 1),)))
    assert said(log.violation(LIFE)) == ("block 1 was copied to the host without having just lost a digest", "a block of [0]", "block 1")


def test_a_slot_must_exist():
    violation = offloaded(slot=2).violation(LIFE)
    assert said(violation) == ("block 0 was copied to a slot that the host tier does not have", "a slot of 0 to 1", "2")


def test_what_was_not_loaded_does_not_count_as_computed():
    log = gone(offloaded()).submit("r3", ONE).add(Allocated(request="r3", blocks=(0, 1), evicted=(0, 1)))
    assert log.add(Admitted(request="r3", life=1, computed=4)).violation(LIFE).got == "4 tokens computed"


# reset-truth


def test_a_reset_clears_both_tiers():
    assert gone(offloaded()).reset().violation(RESET).sentence == "a reset cleared the device and left the host tier as it was"
    log = gone(offloaded())
    log.pause("keep", clear_cache=True).cleared().effective("keep", clear_cache=True)
    assert said(log.violation(RESET)) == (
        "a reset cleared the device and left the host tier as it was",
        "`cleared` for the host after `cleared` for the device",
        "1 copies on the host",
    )
    assert log.violation(RESET).seq == log.last(PauseEffective)


def test_a_reset_says_what_the_host_tier_holds():
    log = gone(offloaded()).add(Cleared(tier="host", success=True, empty=False))
    assert log.violation(RESET).sentence == "a reset reported success and the host tier is not empty"


def test_a_copy_that_a_reset_reported_gone_is_not_loaded():
    log = gone(offloaded()).pause("keep", clear_cache=True).cleared("device", "host").effective("keep", clear_cache=True).resume()
    log.submit("r3", ONE).add(Allocated(request="r3", blocks=(0, 1), evicted=()), Loaded(request="r3", blocks=((0, 0),)))
    assert said(log.violation(RESET)) == (
        "r3 loaded slot 0, whose copy a reset had reported gone",
        "no copy that is older than the reset",
        "slots [0] still have theirs",
    )


# mode-fidelity


def test_a_clear_that_was_asked_for_empties_the_host():
    log = offloaded().pause("keep", clear_cache=True)
    log.add(Preempted(request="r2", by=None), Freed(request="r2", head=(), tail=(0, 1))).cleared().effective("keep", clear_cache=True)
    assert log.violation(MODE).sentence == "a pause with clear_cache=True took effect and the cache had not been emptied on the host"
