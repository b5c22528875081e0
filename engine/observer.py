"""Who watches an engine: a method per transition, called at the moment it happens.

Arguments are plain values that the observer may keep. An observer must not call
back into the engine. Block ids run from 0 to num_blocks - 1; `digest` is the
engine's own value for a block's contents and everything before them: equal
digests, equal contents. Positions count a request's tokens from 0, prompt first.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence


class Observer:
    """Ignores everything; override what you need."""

    def accepted(self, request_id: str, *, parked: bool) -> None:
        """The core took the request on; `parked`: it came while paused or out of service."""

    def blocked(self, request_id: str) -> None:
        """Held in front of the core until resume (late-request policy `block`)."""

    def admitted(self, request_id: str, *, life: int, num_computed_tokens: int) -> None:
        """Moved from waiting to running; the computed tokens came from prefix hits."""

    def preempted(self, request_id: str, *, by: str | None) -> None:
        """Moved from running to the front of waiting, for another request's need or (None) a cache reset."""

    def finished(
        self, request_id: str, *, reason: str, num_prompt_tokens: int, num_output_tokens: int, spans: Sequence[tuple[str, int, int]]
    ) -> None:
        """Ended with `length`, `stop` or `abort`; spans (version, start, end) partition its output."""

    def hit(self, request_id: str, blocks: Sequence[int]) -> None:
        """Admission claimed cached blocks, first to last."""

    def allocated(self, request_id: str, blocks: Sequence[int], *, evicted: Sequence[int]) -> None:
        """Took blocks from the head of the free queue; those in `evicted` lost a digest by it."""

    def stored(self, request_id: str, blocks: Sequence[tuple[int, Hashable]]) -> None:
        """Published (block, digest) pairs: from now on they can be hit."""

    def freed(self, request_id: str, *, head: Sequence[int], tail: Sequence[int]) -> None:
        """Let go of all its blocks; of those no one holds any more, the free queue now begins with `head` and ends with `tail`."""

    def cleared(self, *, success: bool, empty: bool) -> None:
        """A cache reset was carried out or refused; `empty`: no block is held and no digest is left."""

    def launched(self, step: int, batch: Sequence[tuple[str, int, int]]) -> None:
        """A forward pass began over (request id, first position, token count), in scheduling order."""

    def landed(self, step: int, sampled: Sequence[tuple[str, int]]) -> None:
        """It ended with (request id, token), in scheduling order."""

    def step_failed(self, step: int, *, why: str) -> None:
        """The forward pass raised: it samples nothing, and no step follows."""

    def pause_pending(self, mode: str, *, clear_cache: bool) -> None:
        """A pause was taken up; mode and flag are what all pending calls together ask for."""

    def pause_effective(self, mode: str, *, clear_cache: bool) -> None:
        """The engine is quiet: the pending pause calls return."""

    def resumed(self) -> None:
        """Scheduling goes on."""

    def update_started(self) -> None:
        """A weight session is open."""

    def part_received(self, *, tensors: int, num_bytes: int) -> None:
        """One update call wrote these tensors."""

    def update_failed(self, phase: str, *, wrote: bool, why: str) -> None:
        """`start`, `update` or `finish` broke; `wrote`: after at least one byte, so the engine is out of service."""

    def committed(self, version: str) -> None:
        """The session finished: tokens sampled from now on belong to this version."""

    def relabelled(self, version: str) -> None:
        """The version label was set without touching weights."""
