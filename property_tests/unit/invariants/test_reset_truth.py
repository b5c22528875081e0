"""reset-truth: a reset that says it succeeded left nothing behind."""

from __future__ import annotations

from harness.events import Allocated, Cleared, Hit
from harness.operations import ResetPrefixCache

from .logs import Timeline, said

ID = "reset-truth"

REFUSED = Cleared(tier="device", success=False, empty=False)


def running() -> Timeline:
    """r1 holds block 0, which is published, and block 1."""
    return Timeline().submit("r1", range(20, 26)).admit("r1", [0, 1], stored=[(0, 0)]).step(("r1", 0, 6), r1=7)


def ended() -> Timeline:
    """Block 0 is cached."""
    return running().finish("r1", head=(1,), tail=(0,)).deliver(r1="length")


def test_a_reset_of_an_idle_engine():
    assert ended().reset().submit("r2", range(20, 26)).admit("r2", [1, 2], stored=[(1, 0)]).holds(ID)


def test_success_with_blocks_held():
    violation = running().reset().violation(ID)
    assert said(violation) == (
        "a reset reported success and the cache is not empty",
        "no block held and no digest left",
        "blocks [0, 1] held",
    )


def test_success_that_the_engine_itself_does_not_believe():
    violation = ended().take_up(ResetPrefixCache()).add(Cleared(tier="device", success=True, empty=False)).violation(ID)
    assert violation.got == "the engine says itself that it is not"


def test_a_hit_on_what_was_forgotten():
    violation = ended().reset().submit("r2", range(20, 26)).add(Hit(request="r2", blocks=(0,))).violation(ID)
    assert said(violation) == (
        "r2 hit block 0, whose digest a reset had reported gone",
        "no digest that is older than the reset",
        "blocks [0] still have theirs",
    )
    assert [cause.what for cause in violation.cause] == ["cleared, success reported"]


def test_an_eviction_of_what_was_forgotten():
    violation = ended().reset().submit("r2", range(30, 34)).add(Allocated(request="r2", blocks=(0,), evicted=(0,))).violation(ID)
    assert violation.sentence == "r2 evicted block 0, whose digest a reset had reported gone"


def test_a_block_published_anew_may_be_hit():
    log = ended().reset().submit("r2", range(20, 26)).admit("r2", [1, 0], stored=[(1, 0)]).step(("r2", 0, 6), r2=7)
    assert log.submit("r3", range(20, 26)).add(Hit(request="r3", blocks=(1,))).holds(ID)


def test_a_refusal_while_requests_hold_blocks():
    assert running().take_up(ResetPrefixCache()).add(REFUSED).refuse("busy").holds(ID)


def test_a_refusal_while_nobody_holds_a_block():
    violation = ended().take_up(ResetPrefixCache()).add(REFUSED).violation(ID)
    assert said(violation) == (
        "a reset was refused that had to succeed",
        "success: no live request holds a block",
        "refused, with [] holding blocks",
    )


def test_a_refusal_under_a_pause():
    violation = running().pause("keep").effective("keep").take_up(ResetPrefixCache()).add(REFUSED).violation(ID)
    assert said(violation) == (
        "a reset was refused that had to succeed",
        "success: the pause lets frozen requests give up their blocks",
        "refused, with [r1] holding blocks",
    )
