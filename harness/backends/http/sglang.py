"""The dialect of SGLang's native API, as read in 0.5.23: no server of it ran here, for want of a GPU where this was written."""

from __future__ import annotations

from typing import Any, ClassVar

from harness.backends import Answer, CallRefused
from harness.backends.http.client import BrokenProtocol
from harness.backends.http.contract import spans_of
from harness.backends.http.dialect import Chunk, Dialect, Generation, accepted, finish_reason, refuse
from harness.operations import (
    Abort,
    IsPaused,
    Operation,
    Pause,
    ResetPrefixCache,
    Resume,
    Submit,
    SwapWeights,
    UpdateWeightVersion,
)


class SglangDialect(Dialect):
    """SGLang. `keep` is `retract` with a flush, or `in_place` without; there is no `wait`."""

    name: ClassVar[str] = "sglang"
    switch: ClassVar[str] = "use a version with /pause_generation and /ready"
    optional_paths = ("/abort_request", "/update_weight_version", "/update_weights_from_disk")

    def cannot(self, operation: Operation) -> str | None:
        match operation:
            case Pause(mode="wait"):
                return "wait: SGLang's pause has the modes abort, retract and in_place"
            case UpdateWeightVersion(allow_unpaused=True):
                return "be told to allow it unpaused: SGLang never asks"
            case SwapWeights() if reason := self.cannot_send(operation):
                return reason
            case SwapWeights() if not self.has("/update_weights_from_disk"):
                return "be given new weights: it has no /update_weights_from_disk"
        return super().cannot(operation)

    def submit(self, operation: Submit) -> Generation:
        sampling = {"max_new_tokens": operation.max_tokens, "temperature": operation.temperature, "ignore_eos": operation.ignore_eos}
        if operation.top_p != 1:
            sampling["top_p"] = operation.top_p
        if operation.top_k:
            sampling["top_k"] = operation.top_k
        if operation.min_p:
            sampling["min_p"] = operation.min_p
        body = {
            "rid": self.request_id(operation.id),
            "input_ids": list(operation.prompt.token_ids or ()),
            "sampling_params": sampling,
            "stream": True,
        }
        if operation.cache_salt is not None:
            body["extra_key"] = operation.cache_salt
        return Generation("/generate", body, {})

    def request_id(self, id: str) -> str:
        """An abort reaches every id that begins with the one named: the end mark keeps `r1` from reaching `r10`."""
        return f"{id}!"

    def read(self, event: Any, received: int) -> Chunk:
        """`output_ids` are all tokens so far, or with --incremental-streaming-output the new ones: their count tells which."""
        if not isinstance(event, dict):
            raise BrokenProtocol(f"expected a JSON object as an event of the stream, got {event!r:.200}")
        if isinstance(error := event.get("error"), dict):
            raise CallRefused("failed", str(error.get("message", error)))
        tokens, meta = event.get("output_ids"), event.get("meta_info")
        if tokens is None or not isinstance(meta, dict):
            raise BrokenProtocol("the stream has no output_ids or no meta_info: expected those of SGLang's /generate")
        count = meta.get("completion_tokens")
        new = tokens[received:] if len(tokens) == count else tokens
        reason = meta.get("finish_reason")
        kind = finish_reason(reason.get("type") if isinstance(reason, dict) else reason)
        spans = spans_of(meta.get("weight_versions")) if kind else None
        return Chunk(tuple(new), kind, meta.get("prompt_tokens"), count, meta.get("cached_tokens"), spans)

    async def pause(self, operation: Pause) -> Answer:
        mode = "abort" if operation.mode == "abort" else "retract" if operation.clear_cache else "in_place"
        reply = accepted(await self.client.post("/pause_generation", {"mode": mode}))
        if operation.clear_cache:
            await self.reset_prefix_cache(ResetPrefixCache())
        return Answer({"status": "paused"}, reply.status)

    async def resume(self, operation: Resume) -> Answer:
        return Answer({"status": "resumed"}, accepted(await self.client.post("/continue_generation", {})).status)

    async def is_paused(self, operation: IsPaused) -> Answer:
        """`/ready` is 503 while paused."""
        reply = await self.client.get("/ready")
        if not reply.ok and reply.status != 503:
            refuse(reply)
        return Answer({"is_paused": reply.status == 503}, reply.status)

    async def abort(self, operation: Abort) -> Answer:
        """Nothing says how many were aborted."""
        bodies = [{"abort_all": True}] if operation.ids == "all" else [{"rid": self.request_id(id)} for id in operation.ids]
        replies = [accepted(await self.client.post("/abort_request", body)) for body in bodies]
        return Answer({}, replies[-1].status if replies else None)

    async def reset_prefix_cache(self, operation: ResetPrefixCache) -> Answer:
        reply = await self.client.post("/flush_cache")
        if reply.status == 400:
            raise CallRefused("busy", str(reply), status=reply.status)
        return Answer({"status": "reset"}, accepted(reply).status)

    async def swap_weights(self, operation: SwapWeights) -> Answer:
        """Without a flush of its own: what becomes of the cache is for the pause to say."""
        body: dict[str, Any] = {"model_path": self.folder_of(operation.source), "flush_cache": False, "abort_all_requests": False}
        if operation.version is not None:
            body["weight_version"] = operation.version
        reply = accepted(await self.client.post("/update_weights_from_disk", body))
        if reply.get("success") is False:
            raise CallRefused("failed", str(reply), status=reply.status)
        return Answer({"status": "finished", "weight_version": await self.weight_version()}, reply.status)

    async def update_weight_version(self, operation: UpdateWeightVersion) -> Answer:
        body = {"new_version": operation.version, "abort_all_requests": False}
        reply = accepted(await self.client.post("/update_weight_version", body))
        return Answer({"weight_version": reply.get("new_version")}, reply.status)

    async def weight_version(self) -> str | None:
        reply = await self.client.get("/model_info")
        return reply.get("weight_version") if reply.ok else None
