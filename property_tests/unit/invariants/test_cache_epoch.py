"""cache-epoch: nothing attends to KV that a clear was to take away."""

from __future__ import annotations

from harness.events import (
    Cleared,
    Committed,
    Freed,
    Launched,
    PartReceived,
    PauseEffective,
    Preempted,
    Received,
    UpdateFailed,
    UpdateStarted,
)
from harness.operations import ResetPrefixCache, StartWeightUpdate, SwapWeights

from .logs import NEW_WEIGHTS, Timeline, said

ID = "cache-epoch"
PROMPT = [20, 21, 22, 23, 24]


def running() -> Timeline:
    """r1 holds block 0, full and published, and block 1."""
    log = Timeline().submit("r1", PROMPT).admit("r1", [0, 1], stored=[(0, 0)])
    return log.step(("r1", 0, 5), r1=7)


def cleared(log: Timeline) -> Timeline:
    return log.pause("keep", clear_cache=True).add(
        Preempted(request="r1", by=None), Freed(request="r1", head=(1,), tail=(0,)), Cleared(tier="device", success=True, empty=True)
    )


def test_old_kv_may_stay_without_clear():
    log = running().pause("keep").effective("keep").swap("v2").resume()
    assert log.step(("r1", 5, 1), r1=8).holds(ID)


def test_recomputed_kv_after_clear_is_new():
    log = cleared(running()).effective("keep", clear_cache=True).swap("v2").resume()
    assert log.admit("r1", [1, 2], life=2).step(("r1", 0, 6), r1=8).step(("r1", 6, 1), r1=9).holds(ID)


def test_a_clear_that_was_not_done_leaves_stale_kv():
    log = running()
    written = log.last(Launched)
    log.pause("keep", clear_cache=True).effective("keep", clear_cache=True).swap("v2").resume()
    violation = log.step(("r1", 5, 1), r1=8).violation(ID)
    assert said(violation) == (
        "step 2 of r1 attends to stale KV",
        "entries of epoch 1 only, as a clear was promised",
        "the entry at position 0 is of epoch 0",
    )
    assert violation.seq == log.last(Launched)
    assert [(cause.seq, cause.what) for cause in violation.cause] == [
        (written, "written in epoch 0"),
        (log.last(PauseEffective), "an empty cache promised"),
        (log.last(PartReceived), "first byte of epoch 1"),
    ]


def test_stale_kv_is_reported_once_and_not_at_every_step():
    log = running().pause("keep", clear_cache=True).effective("keep", clear_cache=True).swap("v2").resume()
    log.step(("r1", 5, 1), r1=8).step(("r1", 6, 1), r1=9).step(("r1", 7, 1), r1=10)
    assert (log.violation(ID).sentence, log.judgement(ID).more) == ("step 2 of r1 attends to stale KV", 0)


def test_the_promise_is_the_callers_even_if_the_engine_forgets_it():
    log = running().pause("keep", clear_cache=True).effective("keep", clear_cache=False).swap("v2").resume()
    assert log.step(("r1", 5, 1), r1=8).violation(ID).sentence == "step 2 of r1 attends to stale KV"


def test_a_clear_promised_after_the_update_counts():
    log = running().pause("keep").effective("keep").swap("v2").pause("keep", clear_cache=True).effective("keep", clear_cache=True)
    assert log.resume().step(("r1", 5, 1), r1=8).violation(ID).got == "the entry at position 0 is of epoch 0"


def test_a_clear_without_an_update_leaves_nothing_stale():
    log = running().pause("keep", clear_cache=True).effective("keep", clear_cache=True).resume()
    assert log.step(("r1", 5, 1), r1=8).holds(ID)


def test_a_clear_promised_before_the_entry_was_written_does_not_count():
    log = cleared(running()).effective("keep", clear_cache=True).resume()
    log.admit("r1", [1, 2], life=2).step(("r1", 0, 6), r1=8)
    log.pause("keep").effective("keep").swap("v2").resume()
    assert log.step(("r1", 6, 1), r1=9).holds(ID)


def hit_after(log: Timeline) -> Timeline:
    """r2 shares r1's first block."""
    return log.submit("r2", PROMPT).admit("r2", [1], hit=[0]).step(("r2", 4, 1), r2=7)


def ended() -> Timeline:
    return running().abort("r1").add(Freed(request="r1", head=(1,), tail=(0,)))


def test_a_hit_of_old_kv_without_clear():
    assert hit_after(ended().pause("keep").effective("keep").swap("v2").resume()).holds(ID)


def test_a_stale_hit():
    log = ended().pause("keep", clear_cache=True).effective("keep", clear_cache=True).swap("v2").resume()
    violation = hit_after(log).violation(ID)
    assert said(violation) == (
        "r2 hit block 0, whose KV is stale",
        "entries of epoch 1 only, as a clear was promised",
        "the entry at position 0 is of epoch 0",
    )


def test_a_reset_that_returned_success_is_a_promise():
    log = ended().take_up(ResetPrefixCache())
    taken_up = log.last(Received)
    log.answer({"status": "reset"}).pause("keep").effective("keep").swap("v2").resume()
    violation = hit_after(log).violation(ID)
    assert (violation.sentence, violation.cause[1].seq) == ("r2 hit block 0, whose KV is stale", taken_up)


def test_a_refused_reset_is_no_promise():
    log = ended().take_up(ResetPrefixCache()).refuse("busy").pause("keep").effective("keep").swap("v2").resume()
    assert hit_after(log).holds(ID)


def test_the_epoch_rises_with_the_first_byte_of_a_failed_update():
    log = running().pause("keep", clear_cache=True).effective("keep", clear_cache=True)
    log.take_up(SwapWeights(source=NEW_WEIGHTS, fails=True)).add(UpdateStarted(), UpdateFailed(phase="update", wrote=True, why="broke"))
    violation = log.refuse("failed").step(("r1", 5, 1), r1=8).violation(ID)
    assert violation.cause[-1].seq == log.last(UpdateFailed)


def test_a_block_filled_across_a_boundary_keeps_its_old_entries():
    log = running().pause("keep").effective("keep").swap("v2").resume().step(("r1", 5, 1), r1=8)
    log.pause("keep", clear_cache=True).effective("keep", clear_cache=True).resume()
    assert log.step(("r1", 6, 1), r1=9).violation(ID).got == "the entry at position 0 is of epoch 0"


def test_an_update_beside_steps_promises_nothing():
    log = running().take_up(StartWeightUpdate(allow_unpaused=True)).add(UpdateStarted()).answer()
    log.add(PartReceived(part=1, of=1, tensors=1, bytes=4)).step(("r1", 5, 1), r1=8).add(Committed(version="v2"))
    assert log.step(("r1", 6, 1), r1=9).holds(ID)


def test_an_update_that_nobody_allowed_keeps_nothing():
    log = running()
    written = log.last(Launched)
    violation = log.swap("v2").step(("r1", 5, 1), r1=8).violation(ID)
    assert said(violation) == (
        "step 2 of r1 attends to stale KV",
        "entries of epoch 1 only, as no pause kept older ones",
        "the entry at position 0 is of epoch 0",
    )
    part = log.last(PartReceived)
    assert [(cause.seq, cause.what) for cause in violation.cause] == [
        (written, "written in epoch 0"),
        (part, "first byte of epoch 1"),
        (part, "new weights without a pause"),
    ]


def test_a_pause_that_is_pending_keeps_nothing():
    log = running().pause("keep").swap("v2").effective("keep", ops=[2]).resume()
    assert log.step(("r1", 5, 1), r1=8).violation(ID).expected == "entries of epoch 1 only, as no pause kept older ones"


def test_one_that_was_allowed_later_brings_no_old_kv_back():
    log = running().swap("v2").take_up(StartWeightUpdate(allow_unpaused=True)).add(UpdateStarted()).answer()
    log.add(PartReceived(part=1, of=1, tensors=1, bytes=4)).step(("r1", 5, 1), r1=8)
    assert log.violation(ID).got == "the entry at position 0 is of epoch 0"


def test_a_reset_after_an_update_that_was_allowed_beside_steps_counts():
    log = running().take_up(StartWeightUpdate(allow_unpaused=True)).add(UpdateStarted()).answer()
    log.add(PartReceived(part=1, of=1, tensors=1, bytes=4), Committed(version="v2")).take_up(ResetPrefixCache()).answer()
    assert log.step(("r1", 5, 1), r1=8).violation(ID).expected == "entries of epoch 1 only, as a clear was promised"
