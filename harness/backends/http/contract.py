"""The dialect of vLLM's RL server, and ours, which takes the same paths and fields.

vLLM keeps them in `entrypoints/rl/online/api_router.py` (0.32), before that in `entrypoints/serve/dev/rlhf/`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any, ClassVar

from harness.backends import Answer, CallRefused
from harness.backends.http.client import BrokenProtocol, Reply
from harness.backends.http.dialect import (
    SESSION_OPERATIONS,
    SLEEP_OPERATIONS,
    Chunk,
    Dialect,
    Generation,
    accepted,
    finish_reason,
    refuse,
)
from harness.operations import (
    Abort,
    FinishWeightUpdate,
    IsPaused,
    IsSleeping,
    Operation,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    StartWeightUpdate,
    Submit,
    SwapWeights,
    UpdateWeights,
    UpdateWeightVersion,
    WakeUp,
)


class ContractDialect(Dialect):
    """What the two have in common."""

    optional_paths = ("/abort_requests", "/update_weight_version", "/sleep")
    sessions = True
    """Whether weight sessions read a folder of safetensors that the server finds on its machine."""

    def cannot(self, operation: Operation) -> str | None:
        match operation:
            case Abort() if not self.has("/abort_requests"):
                return "abort by id: it has no /abort_requests (vLLM has from 0.26)"
            case UpdateWeightVersion() if not self.has("/update_weight_version"):
                return "set a version: it has no /update_weight_version (vLLM has from 0.27)"
            case UpdateWeights() | SwapWeights() if reason := self.cannot_send(operation):
                return reason
            case StartWeightUpdate() | FinishWeightUpdate() if operation.fails:
                return "be told to fail over HTTP"
        if isinstance(operation, SESSION_OPERATIONS) and not self.sessions:
            return "be sent weights in a session: none of its transfer backends reads folders"
        if isinstance(operation, SLEEP_OPERATIONS) and not self.has("/sleep"):
            return "sleep: it has no /sleep"
        return super().cannot(operation)

    def submit(self, operation: Submit) -> Generation:
        body = {
            "model": self.card.model,
            "prompt": list(operation.prompt.token_ids or ()),
            "return_token_ids": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **sampling(operation),
        }
        if operation.cache_salt is not None:
            body["cache_salt"] = operation.cache_salt
        return Generation("/v1/completions", body, {"X-Request-Id": operation.id})

    def request_id(self, id: str) -> str:
        """What the server calls a request of ours."""
        return f"cmpl-{id}-0"

    def read(self, event: Any, received: int) -> Chunk:
        _raise_error(event)
        usage = event.get("usage") or {}
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        counts = usage.get("prompt_tokens"), usage.get("completion_tokens"), cached
        if not event.get("choices"):
            return Chunk((), None, *counts)
        choice = event["choices"][0]
        tokens, reason = choice.get("token_ids"), finish_reason(choice.get("finish_reason"))
        if tokens is None and reason != "abort":
            raise BrokenProtocol("the stream has no token ids: the server does not know return_token_ids")
        return Chunk(tuple(tokens or ()), reason, *counts, spans_of(choice.get("weight_versions")))

    async def pause(self, operation: Pause) -> Answer:
        waits = operation.mode == "wait"
        reply = await self.client.post("/pause", bounded=not waits, mode=operation.mode, clear_cache=operation.clear_cache)
        return _answer(reply, {"status": "paused"})

    async def resume(self, operation: Resume) -> Answer:
        return _answer(await self.client.post("/resume"), {"status": "resumed"})

    async def is_paused(self, operation: IsPaused) -> Answer:
        reply = accepted(await self.client.get("/is_paused"))
        return Answer({"is_paused": reply.get("is_paused")}, reply.status)

    async def abort(self, operation: Abort) -> Answer:
        everything = operation.ids == "all"
        body = {} if everything else {"request_ids": [self.request_id(id) for id in operation.ids]}
        reply = accepted(await self.client.post("/abort_requests", body))
        return Answer({"aborted": reply.get("aborted")}, reply.status)

    async def reset_prefix_cache(self, operation: ResetPrefixCache) -> Answer:
        reply = accepted(await self.client.post("/reset_prefix_cache"))
        if reply.get("success") is False:
            raise CallRefused("busy", str(reply), status=reply.status)
        return Answer({"status": "reset"}, reply.status)

    async def sleep(self, operation: Sleep) -> Answer:
        mode = {} if operation.mode is None else {"mode": operation.mode}
        reply = await self.client.post("/sleep", bounded=operation.mode != "wait", level=operation.level, **mode)
        return _answer(reply, {"status": "sleeping"})

    async def wake_up(self, operation: WakeUp) -> Answer:
        tags: dict[str, Any] = {} if operation.tags is None else {"tags": list(operation.tags)}
        reply = accepted(await self.client.post("/wake_up", **tags))
        return Answer({"status": reply.get("status")}, reply.status)

    async def is_sleeping(self, operation: IsSleeping) -> Answer:
        reply = accepted(await self.client.get("/is_sleeping"))
        return Answer({"is_sleeping": reply.get("is_sleeping")}, reply.status)

    async def start_weight_update(self, operation: StartWeightUpdate) -> Answer:
        unpaused = {"allow_unpaused": True} if operation.allow_unpaused else {}
        return _answer(await self.client.post("/start_weight_update", **unpaused), {"status": "started"})

    async def update_weights(self, operation: UpdateWeights) -> Answer:
        reply = await self.client.post("/update_weights", {"update_info": {"path": self.folder_of(operation.source)}})
        return _answer(reply, {"status": "updated"})

    async def finish_weight_update(self, operation: FinishWeightUpdate) -> Answer:
        body = {} if operation.version is None else {"weight_version": operation.version}
        reply = await self.client.post("/finish_weight_update", body)
        return _answer(reply, {"status": "finished", "weight_version": await self.weight_version()})

    async def swap_weights(self, operation: SwapWeights) -> Answer:
        """Start, one part, finish; a part that was refused before it wrote leaves a session open, which is then closed."""
        await self.start_weight_update(StartWeightUpdate())
        try:
            await self.update_weights(UpdateWeights(source=operation.source))
        except CallRefused:
            with suppress(CallRefused):
                await self.finish_weight_update(FinishWeightUpdate())
            raise
        return await self.finish_weight_update(FinishWeightUpdate(version=operation.version))

    async def update_weight_version(self, operation: UpdateWeightVersion) -> Answer:
        unpaused = {"allow_unpaused": True} if operation.allow_unpaused else {}
        reply = accepted(await self.client.post("/update_weight_version", {"new_version": operation.version}, **unpaused))
        return Answer({"weight_version": reply.get("new_version")}, reply.status)

    async def weight_version(self) -> str | None:
        reply = await self.client.get("/weight_info")
        return reply.get("weight_version") if reply.ok else None


class CaesuraDialect(ContractDialect):
    """Our own server."""

    name: ClassVar[str] = "caesura"
    switch: ClassVar[str] = "start it with --dev-mode"


class VllmDialect(ContractDialect):
    """vLLM. Its token API, where the server has it, also says which weights sampled what."""

    name: ClassVar[str] = "vllm"
    switch: ClassVar[str] = "start it with VLLM_SERVER_DEV_MODE=1 in its environment"
    optional_paths = (*ContractDialect.optional_paths, "/collective_rpc")
    token_api = False
    """Whether /inference/v1/generate is switched on (--enable-scale-out)."""

    async def learn(self) -> None:
        """Which transfer backend it has is said by none of its calls. One that reads folders takes this; every other refuses it,
        as it refuses every field that it does not know, before it does anything. The token API, switched off, is 403; an empty
        body is refused otherwise."""
        self.token_api = (await self.client.post("/inference/v1/generate", {})).status in (400, 422)
        self.sessions = (await self.client.post("/init_weight_transfer_engine", {"init_info": {"backend": "safetensors"}})).ok

    def cannot(self, operation: Operation) -> str | None:
        if isinstance(operation, SwapWeights) and not self.sessions and not self.has("/collective_rpc"):
            return "be given new weights: it has neither a transfer backend that reads folders nor /collective_rpc"
        if isinstance(operation, StartWeightUpdate | UpdateWeightVersion) and operation.allow_unpaused:
            return "be told to allow it unpaused: vLLM never asks"
        return super().cannot(operation)

    def submit(self, operation: Submit) -> Generation:
        if not self.token_api:
            return super().submit(operation)
        body = {
            "model": self.card.model,
            "request_id": operation.id,
            "token_ids": list(operation.prompt.token_ids or ()),
            "sampling_params": sampling(operation),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if operation.cache_salt is not None:
            body["cache_salt"] = operation.cache_salt
        return Generation("/inference/v1/generate", body, {"X-Request-Id": operation.id})

    def request_id(self, id: str) -> str:
        return f"generate-tokens-{id}" if self.token_api else super().request_id(id)

    async def swap_weights(self, operation: SwapWeights) -> Answer:
        """Through a session where one reads folders; else every worker is told to load the folder again, and the label set."""
        if self.sessions:
            return await super().swap_weights(operation)
        reload = {"method": "reload_weights", "kwargs": {"weights_path": self.folder_of(operation.source)}}
        reply = accepted(await self.client.post("/collective_rpc", reload))
        if operation.version is not None and self.has("/update_weight_version"):
            await self.update_weight_version(UpdateWeightVersion(version=operation.version))
        return Answer({"status": "finished", "weight_version": await self.weight_version()}, reply.status)


def sampling(operation: Submit) -> dict[str, Any]:
    """Sampling parameters, those that mean nothing left out."""
    chosen = {
        "max_tokens": operation.max_tokens,
        "temperature": operation.temperature,
        "ignore_eos": operation.ignore_eos,
        "top_p": operation.top_p if operation.top_p != 1 else None,
        "top_k": operation.top_k or None,
        "min_p": operation.min_p or None,
        "seed": operation.seed,
        "logprobs": operation.logprobs,
    }
    return {name: value for name, value in chosen.items() if value is not None}


def spans_of(spans: Any) -> tuple[tuple[str, int, int], ...] | None:
    """`[{"version": v, "start": 0, "end": 3}, ...]` as tuples; None for none."""
    if spans is None:
        return None
    try:
        return tuple((span["version"], span["start"], span["end"]) for span in spans)
    except (KeyError, TypeError) as error:
        raise BrokenProtocol(f"expected weight versions as a list of version, start, end; got {spans!r:.200}") from error


def _raise_error(event: Any) -> None:
    """An event that is an error ends its stream. Raises CallRefused."""
    if not isinstance(event, dict):
        raise BrokenProtocol(f"expected a JSON object as an event of the stream, got {event!r:.200}")
    if isinstance(error := event.get("error"), dict):
        code = error.get("code")
        refuse(Reply("a stream's event", code if isinstance(code, int) else 500, event))


def _answer(reply: Reply, content: dict[str, Any]) -> Answer:
    return Answer(content, accepted(reply).status)
