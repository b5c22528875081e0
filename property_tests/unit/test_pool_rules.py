"""Rules R1, R2, R5 to R9 and R24 of the KV block pool as tables worked out by hand, for the engine's pool and the model's alike.

Model and engine judge each other, so a rule that both misread the same way would show nowhere else. A table is one pool's history:
each row an operation, what it gives, and the whole state after it. Blocks of a request are named first to last, the head of
the free queue stands first, and `A:1,0` says that digest A can be hit in blocks 1 and 0, published in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import pytest

from harness.model.pool import BlockPool

Ids = Sequence[int]


class Pool(Protocol):
    """What the rules say of a pool; digests have names."""

    def take(self, count: int) -> tuple[Ids, Ids]: ...
    def release(self, blocks: Ids) -> tuple[Ids, Ids]: ...
    def claim(self, blocks: Ids) -> None: ...
    def publish(self, block: int, digest: str) -> None: ...
    def find(self, digests: Sequence[str]) -> Ids: ...
    def clear(self) -> bool: ...
    def free(self) -> Ids: ...
    def references(self) -> Ids: ...
    def digests(self) -> dict[str, Ids]: ...


class OfEngine:
    def __init__(self, num_blocks: int) -> None:
        pytest.importorskip("torch")
        from engine.blocks import BlockPool

        self._pool = BlockPool(num_blocks)
        self.release, self.claim, self.clear = self._pool.release, self._pool.claim, self._pool.clear

    def take(self, count: int) -> tuple[Ids, Ids]:
        taken = self._pool.take(count)
        return taken.blocks, taken.evicted

    def publish(self, block: int, digest: str) -> None:
        self._pool.register(block, digest.encode())

    def find(self, digests: Sequence[str]) -> Ids:
        return self._pool.find(digest.encode() for digest in digests)

    def free(self) -> Ids:
        return self._pool.free_queue

    def references(self) -> Ids:
        return self._pool.references

    def digests(self) -> dict[str, Ids]:
        return {digest.decode(): blocks for digest, blocks in self._pool.digest_index}


class OfModel:
    """The model asks before it clears, and looks digests up one by one until one is not there."""

    def __init__(self, num_blocks: int) -> None:
        self._pool = BlockPool(num_blocks, block_size=4)
        self.take, self.release, self.claim = self._pool.take, self._pool.release, self._pool.claim

    def publish(self, block: int, digest: str) -> None:
        self._pool.publish(block, ord(digest))

    def find(self, digests: Sequence[str]) -> Ids:
        hits: list[int] = []
        for digest in digests:
            if (block := self._pool.find(ord(digest))) is None:
                break
            hits.append(block)
        return hits

    def clear(self) -> bool:
        if not self._pool.nothing_held:
            return False
        self._pool.clear()
        return True

    def free(self) -> Ids:
        return tuple(self._pool.free)

    def references(self) -> Ids:
        return self._pool.references

    def digests(self) -> dict[str, Ids]:
        return {chr(label): tuple(blocks) for label, blocks in self._pool.holders.items()}


Row = tuple[str, str, str, str, str]
"""Operation, what it gives, free queue, references of each block, digests."""

TABLES: dict[str, list[Row]] = {
    "R1, R5: blocks are taken from the head of the free queue, at first in order of ids": [
        ("take 2", "0 1", "2 3", "1 1 0 0", ""),
        ("take 1", "2", "3", "1 1 1 0", ""),
        ("take 1", "3", "", "1 1 1 1", ""),
    ],
    "R6: without digests the released go to the head, a request's last block foremost": [
        ("take 3", "0 1 2", "3 4", "1 1 1 0 0", ""),
        ("release 0 1 2", "head 2 1 0", "2 1 0 3 4", "0 0 0 0 0", ""),
        ("take 2", "2 1", "0 3 4", "0 1 1 0 0", ""),
        ("release 2 1", "head 1 2", "1 2 0 3 4", "0 0 0 0 0", ""),
    ],
    "R6: with caching off, who releases last is reused first": [
        ("take 2", "0 1", "2 3 4", "1 1 0 0 0", ""),
        ("take 2", "2 3", "4", "1 1 1 1 0", ""),
        ("release 0 1", "head 1 0", "1 0 4", "0 0 1 1 0", ""),
        ("release 2 3", "head 3 2", "3 2 1 0 4", "0 0 0 0 0", ""),
        ("take 3", "3 2 1", "0 4", "0 1 1 1 0", ""),
    ],
    "R6, R5: with digests they go to the end, last block first, so that of a prefix the end is evicted before its beginning": [
        ("take 3", "0 1 2", "3 4", "1 1 1 0 0", ""),
        ("publish 0 A", "", "3 4", "1 1 1 0 0", "A:0"),
        ("publish 1 B", "", "3 4", "1 1 1 0 0", "A:0 B:1"),
        ("publish 2 C", "", "3 4", "1 1 1 0 0", "A:0 B:1 C:2"),
        ("release 0 1 2", "tail 2 1 0", "3 4 2 1 0", "0 0 0 0 0", "A:0 B:1 C:2"),
        ("take 3", "3 4 2 evicts 2", "1 0", "0 0 1 1 1", "A:0 B:1"),
        ("find A B C", "0 1", "1 0", "0 0 1 1 1", "A:0 B:1"),
        ("take 2", "1 0 evicts 1 0", "", "1 1 1 1 1", ""),
    ],
    "R6: a request's blocks without a digest go to the head, its others to the end": [
        ("take 3", "0 1 2", "3 4", "1 1 1 0 0", ""),
        ("publish 0 A", "", "3 4", "1 1 1 0 0", "A:0"),
        ("publish 1 B", "", "3 4", "1 1 1 0 0", "A:0 B:1"),
        ("release 0 1 2", "head 2 tail 1 0", "2 3 4 1 0", "0 0 0 0 0", "A:0 B:1"),
        ("take 2", "2 3", "4 1 0", "0 0 1 1 0", "A:0 B:1"),
    ],
    "R6: the split does not depend on where in a request the digests are": [
        ("take 4", "0 1 2 3", "4", "1 1 1 1 0", ""),
        ("publish 3 D", "", "4", "1 1 1 1 0", "D:3"),
        ("publish 1 B", "", "4", "1 1 1 1 0", "D:3 B:1"),
        ("release 0 1 2 3", "head 2 0 tail 3 1", "2 0 4 3 1", "0 0 0 0 0", "D:3 B:1"),
    ],
    "R6, R5: of cached blocks, those that were released first are evicted first": [
        ("take 1", "0", "1 2 3", "1 0 0 0", ""),
        ("take 2", "1 2", "3", "1 1 1 0", ""),
        ("publish 0 A", "", "3", "1 1 1 0", "A:0"),
        ("publish 1 B", "", "3", "1 1 1 0", "A:0 B:1"),
        ("publish 2 C", "", "3", "1 1 1 0", "A:0 B:1 C:2"),
        ("release 1 2", "tail 2 1", "3 2 1", "1 0 0 0", "A:0 B:1 C:2"),
        ("release 0", "tail 0", "3 2 1 0", "0 0 0 0", "A:0 B:1 C:2"),
        ("take 3", "3 2 1 evicts 2 1", "0", "0 1 1 1", "A:0"),
    ],
    "R6, R7: a shared block stays held until its last sharer lets go": [
        ("take 2", "0 1", "2 3 4", "1 1 0 0 0", ""),
        ("publish 0 A", "", "2 3 4", "1 1 0 0 0", "A:0"),
        ("claim 0", "", "2 3 4", "2 1 0 0 0", "A:0"),
        ("take 1", "2", "3 4", "2 1 1 0 0", "A:0"),
        ("release 0 1", "head 1", "1 3 4", "1 0 1 0 0", "A:0"),
        ("release 0 2", "head 2 tail 0", "2 1 3 4 0", "0 0 0 0 0", "A:0"),
    ],
    "R7: an idle block that is claimed leaves its place in the free queue, and keeps its digest": [
        ("take 3", "0 1 2", "3 4", "1 1 1 0 0", ""),
        ("publish 0 A", "", "3 4", "1 1 1 0 0", "A:0"),
        ("publish 1 B", "", "3 4", "1 1 1 0 0", "A:0 B:1"),
        ("publish 2 C", "", "3 4", "1 1 1 0 0", "A:0 B:1 C:2"),
        ("release 0 1 2", "tail 2 1 0", "3 4 2 1 0", "0 0 0 0 0", "A:0 B:1 C:2"),
        ("claim 1", "", "3 4 2 0", "0 1 0 0 0", "A:0 B:1 C:2"),
        ("claim 0 1", "", "3 4 2", "1 2 0 0 0", "A:0 B:1 C:2"),
        ("take 2", "3 4", "2", "1 2 0 1 1", "A:0 B:1 C:2"),
        ("release 0 1 3", "head 3 tail 0", "3 2 0", "0 1 0 0 1", "A:0 B:1 C:2"),
        ("release 1 4", "head 4 tail 1", "4 3 2 0 1", "0 0 0 0 0", "A:0 B:1 C:2"),
    ],
    "R8, R2, R9: equal digests do not exclude each other, and the one published first is hit": [
        ("take 1", "0", "1 2 3", "1 0 0 0", ""),
        ("take 1", "1", "2 3", "1 1 0 0", ""),
        ("publish 1 A", "", "2 3", "1 1 0 0", "A:1"),
        ("publish 0 A", "", "2 3", "1 1 0 0", "A:1,0"),
        ("find A", "1", "2 3", "1 1 0 0", "A:1,0"),
        ("release 1", "tail 1", "2 3 1", "1 0 0 0", "A:1,0"),
        ("find A", "1", "2 3 1", "1 0 0 0", "A:1,0"),
    ],
    "R5: of two equal digests, only that of the block that is taken is lost": [
        ("take 1", "0", "1 2", "1 0 0", ""),
        ("take 1", "1", "2", "1 1 0", ""),
        ("publish 0 A", "", "2", "1 1 0", "A:0"),
        ("publish 1 A", "", "2", "1 1 0", "A:0,1"),
        ("release 0", "tail 0", "2 0", "0 1 0", "A:0,1"),
        ("take 2", "2 0 evicts 0", "", "1 1 1", "A:1"),
        ("find A", "1", "", "1 1 1", "A:1"),
        ("publish 0 A", "", "", "1 1 1", "A:1,0"),
        ("release 1", "tail 1", "1", "1 0 1", "A:1,0"),
        ("take 1", "1 evicts 1", "", "1 1 1", "A:0"),
        ("find A", "0", "", "1 1 1", "A:0"),
    ],
    "R9: a lookup ends at the first digest that is not there, and changes nothing": [
        ("take 3", "0 1 2", "3", "1 1 1 0", ""),
        ("publish 0 A", "", "3", "1 1 1 0", "A:0"),
        ("publish 2 C", "", "3", "1 1 1 0", "A:0 C:2"),
        ("find A B C", "0", "3", "1 1 1 0", "A:0 C:2"),
        ("find B A", "", "3", "1 1 1 0", "A:0 C:2"),
        ("find", "", "3", "1 1 1 0", "A:0 C:2"),
    ],
    "R24: a reset is refused while a block is held; it forgets every digest and leaves the free queue as it is": [
        ("take 2", "0 1", "2 3", "1 1 0 0", ""),
        ("publish 0 A", "", "2 3", "1 1 0 0", "A:0"),
        ("release 0 1", "head 1 tail 0", "1 2 3 0", "0 0 0 0", "A:0"),
        ("take 1", "1", "2 3 0", "0 1 0 0", "A:0"),
        ("clear", "refused", "2 3 0", "0 1 0 0", "A:0"),
        ("release 1", "head 1", "1 2 3 0", "0 0 0 0", "A:0"),
        ("clear", "done", "1 2 3 0", "0 0 0 0", ""),
        ("find A", "", "1 2 3 0", "0 0 0 0", ""),
        ("take 4", "1 2 3 0", "", "1 1 1 1", ""),
    ],
}


@pytest.mark.parametrize("make", [OfEngine, OfModel], ids=["engine", "model"])
@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)
def test_the_pool_follows_its_rules(table: list[Row], make: Callable[[int], Pool]) -> None:
    pool = make(len(table[0][3].split()))
    assert _state(pool)[0].split() == [str(block) for block in range(len(table[0][3].split()))]
    for number, (operation, gives, *after) in enumerate(table, start=1):
        got = _carry_out(pool, operation)
        assert (got, *_state(pool)) == (gives, *after), f"row {number}: {operation}"


def _carry_out(pool: Pool, operation: str) -> str:
    """What the operation gives, in the words of the tables."""
    verb, *words = operation.split()
    match verb:
        case "take":
            blocks, evicted = pool.take(int(words[0]))
            return _joined(_listed(blocks), _listed(evicted, "evicts "))
        case "release":
            head, tail = pool.release([int(word) for word in words])
            return _joined(_listed(head, "head "), _listed(tail, "tail "))
        case "claim":
            pool.claim([int(word) for word in words])
            return ""
        case "publish":
            pool.publish(int(words[0]), words[1])
            return ""
        case "find":
            return _listed(pool.find(words))
        case "clear":
            return "done" if pool.clear() else "refused"
    raise AssertionError(f"no operation of a pool: {operation}")


def _state(pool: Pool) -> tuple[str, str, str]:
    digests = " ".join(f"{digest}:{','.join(map(str, blocks))}" for digest, blocks in pool.digests().items())
    return _listed(pool.free()), _listed(pool.references()), digests


def _listed(blocks: Ids, before: str = "") -> str:
    return before + " ".join(map(str, blocks)) if blocks else ""


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)
