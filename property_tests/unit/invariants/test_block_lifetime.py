"""block-lifetime: one owner at a time, no hit before the KV, no leak."""

from __future__ import annotations

from harness.events import Admitted, Allocated, Finished, Freed, Hit, Launched, Preempted, Stored

from .logs import Timeline, said

ID = "block-lifetime"
PROMPT = [20, 21, 22, 23, 24]


def running(**options: int) -> Timeline:
    """r1 holds block 0, full and published, and block 1."""
    log = Timeline(**options).submit("r1", PROMPT).admit("r1", [0, 1], stored=[(0, 0)])
    return log.step(("r1", 0, 5), r1=7)


def shared() -> Timeline:
    """r2 shares block 0 and holds block 2."""
    return running().submit("r2", PROMPT).admit("r2", [2], hit=[0]).step(("r1", 5, 1), ("r2", 4, 1), r1=8, r2=7)


def test_blocks_are_taken_shared_cached_hit_again_and_evicted():
    log = shared().abort("r1", head={"r1": (1,)}).abort("r2").add(Freed(request="r2", head=(2,), tail=(0,)))
    log.submit("r3", PROMPT).admit("r3", [2], hit=[0]).step(("r3", 4, 1), r3=7)
    log.abort("r3").add(Freed(request="r3", head=(2,), tail=(0,)))
    log.submit("r4", range(30, 62)).admit("r4", [2, 1, 3, 4, 5, 6, 7, 0], evicted=[0])
    assert log.step(("r4", 0, 32), r4=7).abort("r4", head={"r4": (0, 7, 6, 5, 4, 3, 1, 2)}).close().holds(ID)


def test_one_may_hit_what_another_writes_in_the_same_step():
    log = Timeline().submit("r1", PROMPT).submit("r2", PROMPT)
    log.admit("r1", [0, 1], stored=[(0, 0)]).admit("r2", [2], hit=[0])
    assert log.step(("r1", 0, 5), ("r2", 4, 1), r1=7, r2=7).holds(ID)


def test_a_readmitted_request_may_hit_its_own_blocks():
    log = running().add(Preempted(request="r1", by=None), Freed(request="r1", head=(1,), tail=(0,)))
    assert log.admit("r1", [1], hit=[0], life=2).step(("r1", 4, 2), r1=8).holds(ID)


def test_a_held_block_is_not_given_away():
    log = running().submit("r2", [30]).admit("r2", [0], evicted=[0])
    assert said(log.violation(ID)) == ("r2 was given block 0 while it is held", "a free block", "held by [r1]")


def test_blocks_come_from_the_head_of_the_free_queue():
    log = running().submit("r2", range(30, 36)).admit("r2", [3, 2])
    assert said(log.violation(ID)) == ("r2 was given other blocks than the head of the free queue", "[2, 3]", "[3, 2]")


def test_a_block_that_does_not_exist_is_not_given():
    log = running(num_blocks=2).submit("r2", [30]).admit("r2", [9])
    assert said(log.violation(ID))[1:] == ("[]", "[9]")


def test_a_cached_block_loses_its_digest_when_it_is_taken():
    log = running(num_blocks=2).abort("r1").add(Freed(request="r1", head=(1,), tail=(0,)))
    log.submit("r2", range(30, 36)).admit("r2", [1, 0])
    assert said(log.violation(ID)) == ("blocks that r2 was given did not lose their digests", "evicted [0]", "evicted []")


def test_only_live_requests_are_given_blocks():
    log = running().abort("r1").add(Freed(request="r1", head=(1,), tail=(0,)))
    log.add(Allocated(request="r1", blocks=(1,), evicted=()))
    violation = log.violation(ID)
    assert said(violation) == ("r1 was given blocks without being live", "a live request", "r1, finished")
    assert violation.cause[0].seq == log.last(Finished)


def test_a_hit_needs_a_digest():
    log = running().submit("r2", PROMPT).admit("r2", hit=[1])
    assert said(log.violation(ID)) == ("r2 hit block 1, which has no digest", "a cached or shared block", "held by [r1]")


def test_a_cleared_cache_is_not_hit():
    log = running().abort("r1").add(Freed(request="r1", head=(1,), tail=(0,))).reset()
    log.submit("r2", PROMPT).admit("r2", [1], hit=[0])
    assert said(log.violation(ID)) == ("r2 hit block 0, which has no digest", "a cached or shared block", "free")


def aborted_before_its_step() -> Timeline:
    """The digest is published when the step is scheduled; an abort comes before the step."""
    log = Timeline().submit("r1", PROMPT).admit("r1", [0, 1], stored=[(0, 0)])
    return log.abort("r1").add(Freed(request="r1", head=(1,), tail=(0,)))


def test_a_block_whose_step_never_ran_cannot_be_hit():
    violation = aborted_before_its_step().violation(ID)
    assert said(violation) == (
        "block 0, published by r1, can be hit and the step that was to write it did not run",
        "its digest withdrawn, or all its entries written",
        "label 0, entry 0 of 4 never written",
    )


def test_a_block_whose_step_never_ran_is_not_hit():
    log = aborted_before_its_step().submit("r2", PROMPT).admit("r2", [1], hit=[0]).step(("r2", 4, 1), r2=7)
    violation = log.judgement(ID).violations[-1]
    assert said(violation) == (
        "step 1 of r2 attends to a hit, and no launched step wrote the KV before it",
        "every earlier position written by a launched step",
        "position 0 (block 0) was never written",
    )
    assert violation.seq == log.last(Launched)


def preempted_before_its_step() -> Timeline:
    log = Timeline().submit("r1", PROMPT).admit("r1", [0, 1], stored=[(0, 0)])
    return log.add(Preempted(request="r1", by=None), Freed(request="r1", head=(1,), tail=(0,)))


def test_a_block_whose_step_ran_without_its_request_cannot_be_hit():
    log = preempted_before_its_step().admit("r1", [1, 2], stored=[(1, 0)], life=2).launch(("r1", 0, 5))
    violation = log.violation(ID)
    assert violation.sentence == "block 0, published by r1, can be hit and the step that was to write it did not run"
    assert [cause.what for cause in violation.cause] == ["published", "r1 preempted"]


def test_a_block_that_nobody_ever_wrote_is_missed_at_the_end():
    assert preempted_before_its_step().close("paused").violation(ID).got == "label 0, entry 0 of 4 never written"


def test_a_digest_that_was_withdrawn_needs_no_step():
    log = Timeline(num_blocks=2).submit("r1", PROMPT).admit("r1", [0, 1], stored=[(0, 0)])
    log.add(Preempted(request="r1", by=None), Freed(request="r1", head=(1,), tail=(0,)))
    assert log.admit("r1", [1, 0], evicted=[0], stored=[(1, 0)], life=2).launch(("r1", 0, 5)).holds(ID)


def test_a_block_that_can_be_hit_is_not_written_again():
    violation = running().launch(("r1", 2, 4)).violation(ID)
    assert said(violation) == (
        "step 2 of r1 writes position 2 again, in block 0, which can be hit",
        "each entry of a block with a digest written once",
        "written before",
    )
    assert [cause.what for cause in violation.cause] == ["the entry was written"]


def test_the_writer_of_a_hit_stands_before_its_reader():
    log = Timeline().submit("r1", PROMPT).submit("r2", PROMPT)
    log.admit("r1", [0, 1], stored=[(0, 0)]).admit("r2", [2], hit=[0])
    log.step(("r2", 4, 1), ("r1", 0, 5), r1=7, r2=7)
    assert log.violation(ID).sentence == "step 1 of r2 attends to a hit, and no launched step wrote the KV before it"


def test_a_block_written_in_part_is_not_hit():
    log = Timeline().submit("r1", PROMPT).admit("r1", [0, 1], stored=[(0, 0)]).step(("r1", 0, 3))
    log.submit("r2", PROMPT).admit("r2", [2], hit=[0]).step(("r2", 4, 1), r2=7)
    assert [violation.got for violation in log.judgement(ID).violations] == [
        "label 0, entry 3 of 4 never written",
        "position 3 (block 0) was never written",
    ]


def test_no_position_is_left_out():
    log = running().step(("r1", 6, 1), r1=8)
    assert said(log.violation(ID)) == (
        "step 2 of r1 starts at position 6, and no launched step wrote the KV before it",
        "every earlier position written by a launched step",
        "position 5 (block 1) was never written",
    )


def test_kv_that_was_not_hit_does_not_count_as_computed():
    log = Timeline().submit("r1", PROMPT).add(Allocated(request="r1", blocks=(0, 1), evicted=()))
    log.add(Admitted(request="r1", life=1, computed=4))
    assert said(log.violation(ID)) == (
        "r1 was admitted with KV that it neither hit nor loaded",
        "at most 0 tokens, from 0 blocks",
        "4 tokens computed",
    )


def test_a_hit_stands_for_the_requests_own_tokens():
    log = running().submit("r2", [20, 21, 22, 99, 24]).admit("r2", hit=[0])
    assert said(log.violation(ID)) == (
        "r2 hit block 0, whose digest stands for other contents",
        "tokens [20, 21, 22, 99], salt None, after label None",
        "tokens [20, 21, 22, 23], salt None, after label None",
    )


def test_a_hit_stands_for_the_requests_own_salt():
    log = running().submit("r2", PROMPT, cache_salt="v2").admit("r2", hit=[0])
    assert log.violation(ID).expected == "tokens [20, 21, 22, 23], salt v2, after label None"


def test_one_label_has_one_content():
    log = running().submit("r2", [20, 21, 22, 99, 24]).admit("r2", [2, 3], stored=[(2, 0)])
    assert said(log.violation(ID)) == (
        "r2 published block 2 under label 0, which stands for other contents",
        "tokens [20, 21, 22, 23], salt None, after label None",
        "tokens [20, 21, 22, 99], salt None, after label None",
    )


def test_one_label_has_one_parent():
    log = Timeline().submit("r1", [20] * 9).admit("r1", [0, 1, 2], stored=[(0, 0), (1, 0)])
    assert said(log.violation(ID))[1:] == (
        "tokens [20, 20, 20, 20], salt None, after label None",
        "tokens [20, 20, 20, 20], salt None, after label 0",
    )


def test_equal_contents_may_be_published_twice_under_one_label():
    log = running().submit("r2", PROMPT).admit("r2", [2, 3], stored=[(2, 0)])
    assert log.step(("r1", 5, 1), ("r2", 0, 5), r1=8, r2=7).holds(ID)


def test_a_block_is_published_once():
    log = running().add(Stored(request="r1", blocks=((0, 0),)))
    assert said(log.violation(ID)) == (
        "r1 published block 0, which has a digest already",
        "label 0 until it is evicted",
        "label 0",
    )


def test_only_a_holder_publishes_a_block():
    log = running().submit("r2", [30]).admit("r2", [2], stored=[(1, 1)])
    assert said(log.violation(ID)) == ("r2 published block 1, which it does not hold", "a block of [2]", "block 1, held by [r1]")


def test_a_block_is_published_when_its_tokens_are_known():
    log = running().add(Stored(request="r1", blocks=((1, 1),)))
    assert said(log.violation(ID)) == ("r1 published block 1 before it has tokens for all of it", "4 tokens", "2")


def test_a_step_writes_into_blocks_that_its_requests_hold():
    log = Timeline().submit("r1", PROMPT).admit("r1", [0]).launch(("r1", 0, 5))
    assert said(log.violation(ID)) == (
        "step 1 writes position 4 of r1 into a block that it does not hold",
        "a block for it among [0]",
        "1 blocks of 4 tokens",
    )


def test_freed_blocks_are_not_written():
    log = running().add(Preempted(request="r1", by=None), Freed(request="r1", head=(1,), tail=(0,))).launch(("r1", 0, 1))
    assert log.violation(ID).sentence == "step 2 writes position 0 of r1 into a block that it does not hold"


def test_only_the_owner_writes():
    log = shared().launch(("r2", 3, 1))
    assert said(log.violation(ID)) == (
        "step 3 of r2 writes into block 0, which was not allocated to it",
        "written by r1 only",
        "held by [r1, r2]",
    )


def test_a_shared_block_is_not_written_again():
    violation = shared().launch(("r1", 3, 1)).violation(ID)
    assert said(violation) == (
        "step 3 of r1 writes into block 0 while others hold it",
        "one reference",
        "2 references, held by [r1, r2]",
    )
    assert violation.cause[0].what == "the entry was written"


def test_a_block_is_freed_once():
    log = running().abort("r1").add(Freed(request="r1", head=(1,), tail=(0,)), Freed(request="r1", head=(1,), tail=()))
    assert said(log.violation(ID)) == ("r1 freed block 1 twice", "in the free queue once", "held by nobody")


def test_a_block_is_freed_into_one_place():
    log = running().abort("r1").add(Freed(request="r1", head=(1, 0), tail=(0,)))
    assert log.violation(ID).sentence == "r1 freed block 0 twice"


def test_a_request_frees_its_own_blocks():
    log = shared().abort("r1").add(Freed(request="r1", head=(1, 2), tail=()))
    assert said(log.violation(ID)) == ("r1 freed block 2, which it does not hold", "a block of [0, 1]", "held by [r2]")


def test_a_shared_block_stays_with_its_sharers():
    log = shared().abort("r1").add(Freed(request="r1", head=(1,), tail=(0,)))
    assert said(log.violation(ID)) == (
        "block 0 went to the free queue while others hold it",
        "held until its last sharer lets go",
        "held by [r1, r2]",
    )


def test_the_last_holder_gives_all_its_blocks_back():
    log = running().abort("r1").add(Freed(request="r1", head=(1,), tail=()))
    assert said(log.violation(ID)) == (
        "r1 let go of blocks that nobody holds any more, and they did not go to the free queue",
        "[0, 1]",
        "without [0]",
    )


def test_blocks_that_were_never_freed_leak():
    violation = running().abort("r1").close().violation(ID)
    assert said(violation) == (
        "blocks leaked: no live request holds them and they are not in the free queue",
        "8 blocks in the free queue",
        "6, without [0, 1]",
    )
    assert violation.cause[0].what == "r1 finished"


def test_blocks_of_live_requests_do_not_leak():
    assert running().pause("keep").effective("keep").close("paused").holds(ID)


def test_hits_belong_to_live_requests():
    log = running().add(Hit(request="r9", blocks=(0,)))
    assert said(log.violation(ID)) == ("r9 hit blocks without being live", "a live request", "r9, unknown")
