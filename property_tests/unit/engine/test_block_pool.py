"""Rules R1 to R9 and R24 of the block pool."""

from __future__ import annotations

from engine.blocks import BlockPool, PrefixDigests


def cached(pool: BlockPool, digests: list[bytes]) -> tuple[int, ...]:
    """Take, publish and release one block for each digest."""
    blocks = pool.take(len(digests)).blocks
    for block, digest in zip(blocks, digests, strict=True):
        pool.register(block, digest)
    pool.release(blocks)
    return blocks


def test_blocks_are_taken_in_order_of_ids_at_first():
    pool = BlockPool(4)
    assert pool.take(3).blocks == (0, 1, 2)
    assert pool.free_queue == (3,)
    assert pool.references == (1, 1, 1, 0)


def test_released_blocks_go_to_the_head_without_a_digest_and_to_the_end_with_one_last_block_first():
    pool = BlockPool(6)
    blocks = pool.take(5).blocks
    for block in (0, 1):
        pool.register(block, bytes([block]))
    released = pool.release(blocks)
    assert released.head == (4, 3, 2)
    assert released.tail == (1, 0)
    assert pool.free_queue == (4, 3, 2, 5, 1, 0)


def test_a_shared_block_stays_held_until_its_last_holder_lets_go():
    pool = BlockPool(2)
    (block,) = pool.take(1).blocks
    pool.register(block, b"x")
    pool.claim([block])
    assert pool.release([block]) == ((), ())
    assert pool.references[block] == 1
    assert pool.release([block]).tail == (block,)


def test_taking_a_cached_block_withdraws_its_own_entry_only():
    pool = BlockPool(2)
    first = pool.take(1).blocks
    second = pool.take(1).blocks
    for (block,) in (first, second):
        pool.register(block, b"same")
    pool.release(first)
    assert pool.find([b"same"]) == first
    taken = pool.take(1)
    assert taken == (first, ((*first, b"same"),)) and taken.evicted == first
    assert pool.digest_index == ((b"same", second),)
    assert pool.find([b"same"]) == second


def test_a_claimed_idle_block_leaves_the_free_queue_and_keeps_its_digest():
    pool = BlockPool(4)
    blocks = cached(pool, [b"a", b"b", b"c"])
    assert pool.free_queue == (3, 2, 1, 0)
    pool.claim([blocks[1]])
    assert pool.free_queue == (3, 2, 0)
    assert pool.find([b"b"]) == (1,)


def test_a_lookup_finds_the_longest_run_and_changes_nothing():
    pool = BlockPool(4)
    cached(pool, [b"a", b"b", b"d"])
    before = (pool.free_queue, pool.references, pool.digest_index)
    assert pool.find([b"a", b"b", b"c", b"d"]) == (0, 1)
    assert pool.num_idle((0, 1)) == 2
    assert (pool.free_queue, pool.references, pool.digest_index) == before


def test_clear_is_refused_while_a_block_is_held_and_keeps_the_order_of_the_free_queue():
    pool = BlockPool(4)
    cached(pool, [b"a", b"b"])
    (held,) = pool.take(1).blocks
    assert not pool.clear()
    assert not pool.is_empty
    assert pool.find([b"a"]) == (0,)
    pool.release([held])
    order = pool.free_queue
    assert pool.clear()
    assert pool.is_empty
    assert pool.free_queue == order
    assert pool.find([b"a"]) == ()


def test_digests_tell_apart_what_came_before_and_the_salt():
    tokens = [1, 2, 3, 4]
    plain = PrefixDigests(2, None).first(2, tokens)
    assert PrefixDigests(2, None).first(2, [1, 2, 3, 4, 5]) == plain
    assert PrefixDigests(2, None).first(2, [9, 2, 3, 4])[1] != plain[1]
    roots = [PrefixDigests(2, salt).first(1, tokens)[0] for salt in (None, "", "a", "b")]
    assert len({*roots}) == 4


def test_digests_do_not_depend_on_the_process():
    (digest,) = PrefixDigests(2, "v1").first(1, [1, 2])
    assert digest.hex() == "c75dc4163cc9ecacbf87295d2bddf54d"


def test_digests_grow_with_the_tokens():
    digests = PrefixDigests(2, None)
    tokens = [1, 2]
    first = digests.first(1, tokens)
    tokens += [3, 4]
    assert digests.first(2, tokens)[:1] == first
    assert digests.first(2, tokens) == PrefixDigests(2, None).first(2, tokens)
