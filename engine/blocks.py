"""The KV pool's bookkeeping: who holds which block, which cached prefixes can be hit, which block is taken next.

Ids only: the KV itself lies in model_runner.py. The order of the free queue
decides what is evicted and is therefore part of the behaviour, not of the
implementation; R1 to R11 name the scheduler rules that each method follows.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

Digest = bytes
"""Identifies the tokens of a block, all tokens before it, and the salt: equal digests, equal contents."""


class Taken(NamedTuple):
    blocks: tuple[int, ...]
    withdrawn: tuple[tuple[int, Digest], ...]
    """Those of them that lost a digest, with it."""

    @property
    def evicted(self) -> tuple[int, ...]:
        return tuple(block for block, _ in self.withdrawn)


class Released(NamedTuple):
    head: tuple[int, ...]
    """The free queue now begins with these."""
    tail: tuple[int, ...]
    """And ends with these, which keep their digests."""


class PrefixDigests:
    """The digests of a request's full blocks. Each is computed once: tokens are only ever appended."""

    def __init__(self, block_size: int, salt: str | None) -> None:
        self._block_size = block_size
        # The leading byte keeps "no salt" apart from every salt, the empty one included.
        root = b"\0" if salt is None else b"\1" + salt.encode("utf-8", "surrogatepass")
        self._chain = [blake2b(root, digest_size=16).digest()]

    def first(self, count: int, token_ids: Sequence[int]) -> list[Digest]:
        """Digests of the first `count` blocks of `token_ids`, all of which must be full."""
        size = self._block_size
        assert count * size <= len(token_ids), (count, size, len(token_ids))
        for index in range(len(self._chain) - 1, count):
            tokens = array("q", token_ids[index * size : (index + 1) * size]).tobytes()
            self._chain.append(blake2b(self._chain[-1] + tokens, digest_size=16).digest())
        return self._chain[1 : count + 1]


class BlockPool:
    """Blocks 0 to num_blocks - 1. A block is held (referenced), cached (unreferenced, with a digest) or free (neither).

    Cached and free blocks both stand in the free queue, which starts in order of ids (R1).
    """

    def __init__(self, num_blocks: int) -> None:
        self._references = [0] * num_blocks
        self._digest_of: list[Digest | None] = [None] * num_blocks
        # Ordered dictionaries give removal from the middle in constant time; the values mean nothing.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._index: dict[Digest, dict[int, None]] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, cached ones included."""
        return len(self._free)

    @property
    def is_empty(self) -> bool:
        """No block is held and no digest is left."""
        return len(self._free) == len(self._references) and not self._index

    @property
    def references(self) -> tuple[int, ...]:
        """Reference count of each block."""
        return tuple(self._references)

    @property
    def free_queue(self) -> tuple[int, ...]:
        """Blocks that can be taken, the next one first."""
        return tuple(self._free)

    @property
    def digest_index(self) -> tuple[tuple[Digest, tuple[int, ...]], ...]:
        """Each digest that can be hit with its blocks, in order of registration; the first block is the one that is hit."""
        return tuple((digest, tuple(blocks)) for digest, blocks in self._index.items())

    def take(self, count: int) -> Taken:
        """Hold the first `count` blocks of the free queue; those with a digest lose it (R5)."""
        assert count <= self.num_free, (count, self.num_free)
        blocks = tuple(self._free.popitem(last=False)[0] for _ in range(count))
        withdrawn = tuple((block, digest) for block in blocks if (digest := self._digest_of[block]) is not None)
        for block, _ in withdrawn:
            self._withdraw(block)
        for block in blocks:
            assert self._references[block] == 0, block
            self._references[block] = 1
        return Taken(blocks, withdrawn)

    def release(self, blocks: Sequence[int]) -> Released:
        """Let go of a request's blocks, last to first (R6).

        Those that no one else holds go to the head of the free queue if they have no digest, to its end otherwise:
        of two cached blocks of one prefix the longer one is evicted first.
        """
        idle = []
        for block in reversed(blocks):
            assert self._references[block] > 0, block
            self._references[block] -= 1
            if self._references[block] == 0:
                idle.append(block)
        head = tuple(block for block in idle if self._digest_of[block] is None)
        tail = tuple(block for block in idle if self._digest_of[block] is not None)
        for block in tail:
            self._free[block] = None
        for block in reversed(head):
            self._free[block] = None
            self._free.move_to_end(block, last=False)
        return Released(head, tail)

    def __contains__(self, digest: Digest) -> bool:
        """Whether some block can be hit by this digest."""
        return digest in self._index

    def find(self, digests: Iterable[Digest]) -> tuple[int, ...]:
        """Blocks of the longest run of `digests` that can be hit, the first registered one of each; nothing changes (R9)."""
        hits = []
        for digest in digests:
            if (blocks := self._index.get(digest)) is None:
                break
            hits.append(next(iter(blocks)))
        return tuple(hits)

    def num_idle(self, blocks: Iterable[int]) -> int:
        """How many of `blocks` no request holds."""
        return sum(self._references[block] == 0 for block in blocks)

    def claim(self, blocks: Iterable[int]) -> None:
        """Hold blocks that were found; they keep their digests (R7)."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def register(self, block: int, digest: Digest) -> None:
        """Publish a held block: from now on it can be hit. Others may have the same digest (R8)."""
        assert self._references[block] > 0 and self._digest_of[block] is None, block
        self._digest_of[block] = digest
        self._index.setdefault(digest, {})[block] = None

    def clear(self) -> bool:
        """Forget every digest, if no block is held; the free queue keeps its order (R24)."""
        if self.num_free < len(self._references):
            return False
        self._digest_of = [None] * len(self._references)
        self._index.clear()
        return True

    def _withdraw(self, block: int) -> None:
        digest = self._digest_of[block]
        assert digest is not None, block
        self._digest_of[block] = None
        del self._index[digest][block]
        if not self._index[digest]:
            del self._index[digest]
