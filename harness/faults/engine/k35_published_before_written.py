"""A block is published when its request gets it, before the step that fills it is composed; an abort leaves an empty hit."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "vllm#43569"
CAUGHT_BY = "block-lifetime"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.request import Request
    from engine.scheduler import Scheduler

    right = Scheduler._grow

    def grow(self: Scheduler, request: Request, num_new: int, *, covered: int, copies: tuple[int, ...] = ()) -> None:
        held = self._blocks_for(covered) * self.config.block_size
        right(self, request, num_new, covered=min(held, request.num_tokens), copies=copies)

    patch(Scheduler, "_grow", grow)
