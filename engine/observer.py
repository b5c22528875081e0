"""Who watches an engine: a method per transition, called at the moment it happens.

Arguments are plain values that the observer may keep. An observer must not call
back into the engine. Block ids run from 0 to num_blocks - 1; `digest` is the
engine's own value for a block's contents and everything before them: equal
digests, equal contents. Positions count a request's tokens from 0, prompt first.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .core import EngineCore
    from .errors import EngineError
    from .outputs import EngineCoreOutput


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

    def offloaded(self, blocks: Sequence[tuple[int, int]]) -> None:
        """Blocks just evicted go to the host tier, as (block, slot) pairs; a slot that held another copy holds it no longer."""

    def loaded(self, request_id: str, blocks: Sequence[tuple[int, int]]) -> None:
        """Admission has these copies put back, as (slot, block) pairs; the copies stay."""

    def cleared(self, *, success: bool, empty: bool, tier: str = "device") -> None:
        """A cache reset was carried out or refused in a tier, `device` or `host`; `empty`: no block is held and no digest is left."""

    def launched(self, step: int, batch: Sequence[tuple[str, int, int]]) -> None:
        """A forward pass began over (request id, first position, token count), in scheduling order."""

    def landed(self, step: int, sampled: Sequence[tuple[str, int]]) -> None:
        """It ended with (request id, token), in scheduling order; tokens that are thrown away are not among them."""

    def dropped(self, step: int, request_id: str, *, why: str) -> None:
        """The step that has just landed sampled a token for a request that was `aborted`, or `finished`, since the launch."""

    def step_failed(self, step: int, *, why: str) -> None:
        """The forward pass raised: it samples nothing, and no step follows."""

    def pause_pending(self, mode: str, *, clear_cache: bool) -> None:
        """A pause was taken up; mode and flag are what all pending calls together ask for."""

    def pause_effective(self, mode: str, *, clear_cache: bool) -> None:
        """The engine is quiet: the pending pause calls return."""

    def resumed(self) -> None:
        """Scheduling goes on."""

    def asleep(self, level: int, *, tags: Sequence[str]) -> None:
        """Memory was given back: the pending sleep calls return; `tags`, sorted: what is asleep now."""

    def awake(self, *, tags: Sequence[str]) -> None:
        """Memory was mapped again; `tags`, sorted: what is still asleep."""

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

    # ---- an engine that runs by itself: told by its loop, around the transitions above ----

    def attached(self, core: EngineCore) -> None:
        """The loop is about to begin. `core` may be read whenever this observer is told something, and now be given a `weight_target`."""

    def called(self, call: int, verb: str, arguments: Mapping[str, object], *, note: str) -> None:
        """The core takes a call up: `verb` and `arguments` as in `engine.messages`, `note` what the caller said with it (`CALL_NOTE`).

        What a shutdown ends is told as an abort of all, under the number of that call.
        """

    def delivered(self, outputs: Sequence[EngineCoreOutput]) -> None:
        """Outputs left for their callers, in this order."""

    def returned(self, call: int, answer: Mapping[str, object] | None, error: EngineError | None) -> None:
        """A call is answered, as docs/semantics.md lists answers, or refused.

        Of a superseded pause or sleep this is told after the transitions of the call that did it, before that call returns.
        """

    def boundary(self) -> None:
        """What was told since the last boundary happened together: one call or one turn of the loop, with all that followed from it."""

    def stopped(self, why: str, *, broke: bool) -> None:
        """Nothing more will be told: the engine was told to stop, and nothing is live; or it broke, perhaps since the last boundary."""
