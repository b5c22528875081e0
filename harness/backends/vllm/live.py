"""Real vLLM running by itself: AsyncLLM, its engine in a process of its own with the recorder in it, called as clients call it.

An engine takes half a minute to start. A run whose shape fits the standing one goes on with it, once that is idle and has its
own weights again: its core gets a new scheduler and block manager for each run, as in lockstep.
"""

# pyright: reportMissingImports=false
# vLLM is not among what lint installs.

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.abstract import Executor

from harness.backends import Answer, BackendError, CallRefused, CannotRun, EngineInfo
from harness.backends.vllm import live_worker, started
from harness.backends.vllm.install import installed
from harness.backends.vllm.labels import LabelledLLM
from harness.backends.vllm.lockstep import INVALID, eos_token_ids
from harness.checkpoints import ensure
from harness.events import ErrorCode, Output
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
    WeightSource,
)
from harness.scenario import EngineShape
from harness.tokenizer import bytes_of, tokenizer_of

Hear = Callable[[Sequence[Output]], None]

BOUND_S = 10.0
"""How long an engine may take for what needs no forward pass."""

AT_LEAST = started.Limits(num_blocks=128, max_model_len=256, max_num_seqs=8, max_num_batched_tokens=256)
"""What an engine is started for if a scenario asks for less, so that it is good for most."""


class VllmLive:
    """AsyncLLM behind the methods of a live backend."""

    name = "vllm-live"
    level = 2

    def __init__(self) -> None:
        self._llm: AsyncLLM | None = None
        self._kind: started.Kind | None = None
        self._limits = AT_LEAST
        """Of the engine that stands."""
        self._submissions = 0
        self._ids: dict[str, str] = {}
        """What vLLM calls each live request: an id used again is another request."""
        self._session_open = self._dirty = False
        """A weight session is open; the weights are not those that the engine started with."""
        self._turn = asyncio.Lock()
        """Held by a call until vLLM's core has been sent all that it takes: calls reach the core in the order in which they were made."""

    async def start(self, shape: EngineShape, folder: Path) -> EngineInfo:
        version, profile, note = installed()
        if shape.host_blocks:
            raise CannotRun(f"engine `{self.name}` has no host tier, the scenario asks for {shape.host_blocks} host_blocks")
        checkpoint = ensure(shape.checkpoint)
        self._tokenizer = tokenizer_of(checkpoint)
        self._eos = eos_token_ids(checkpoint)
        kind = started.Kind(checkpoint, shape.dtype, shape.block_size, made_up=False, async_scheduling=shape.async_scheduling)
        limits = started.Limits(shape.num_blocks, started.model_len(shape), shape.max_num_seqs, shape.max_num_batched_tokens)
        if kind != self._kind or not self._limits.cover(limits) or not await self._settle():
            await self.stop()
            self._limits = limits.with_(AT_LEAST)
            self._llm, self._kind = _start(kind, self._limits, shape), kind
        self._engine.model_config.max_model_len = started.model_len(shape)
        vars(self._engine.renderer).pop("default_cmpl_tok_params", None)  # keeps the longest prompt that there could be
        await self._core("record_to", str(folder.absolute()), shape.model_dump(mode="json"), self._eos)
        versions = {"vllm": version, **({"note": note} if note else {}), "torch": str(torch.__version__)}
        versions["transformers"] = transformers.__version__
        device = "cpu" if current_platform.is_cpu() else torch.cuda.get_device_name()
        return EngineInfo(versions=versions, device=device, profile=profile.name, eos_token_ids=self._eos)

    def tokenize(self, text: str) -> tuple[int, ...]:
        return self._tokenizer.encode(text) if self._tokenizer else bytes_of(text)

    def cannot(self, operation: Operation) -> str | None:
        if isinstance(operation, Sleep | WakeUp | IsSleeping):
            return f"{operation.verb}: it is started without sleep mode, which the CPU does not have"
        if isinstance(operation, UpdateWeights | SwapWeights) and operation.source.spoil is not None:
            return "be sent a bad tensor: a part is handed to vLLM's loader whole, when the session is finished"
        return None

    async def call(self, operation: Operation, heard: Hear) -> Answer:
        return Answer(await self._asked(operation, heard))

    async def end(self, why: str) -> None:
        """A core that died has ended its log itself, if it could."""
        if self._llm is not None and not self._llm.errored:
            with suppress(TimeoutError, EngineDeadError):
                await self._core("record_no_more", why)

    async def stop(self) -> None:
        if self._llm is not None:
            self._llm.shutdown()
        self._llm = self._kind = None
        self._ids = {}
        self._session_open = self._dirty = False

    @property
    def _engine(self) -> AsyncLLM:
        assert self._llm is not None, "a call before start"
        return self._llm

    async def _core(self, method: str, *args: Any) -> None:
        """A utility of the engine core, on every rank. A core that dies meanwhile leaves it unanswered."""
        async with asyncio.timeout(BOUND_S):
            await self._engine.engine_core.call_utility_async(method, *args)

    async def _settle(self) -> bool:
        """Leave nothing of the last run in the engine; False if that cannot be."""
        if self._llm is None or self._llm.errored:
            return False
        try:
            async with asyncio.timeout(BOUND_S):
                await self._llm.pause_generation(mode="abort", clear_cache=True)
                if self._session_open or self._dirty:
                    await self._restore_weights()
                await self._llm.resume_generation()
        except Exception:  # what a failed update leaves of a model may not take weights any more: the next run gets a fresh engine
            return False
        return not self._ids

    async def _restore_weights(self) -> None:
        if not self._session_open:
            await self._engine.start_weight_update()
        await self._engine.update_weights(_update(UpdateWeights(source=WeightSource(original=True))))
        await self._engine.finish_weight_update()
        self._session_open = self._dirty = False

    async def _asked(self, operation: Operation, heard: Hear) -> dict[str, Any]:
        """The answer as docs/semantics.md has it."""
        llm = self._engine
        match operation:
            case Submit():
                return await self._generate(operation, heard)
            case Pause(mode=mode, clear_cache=clear_cache):
                await self._sent(llm.pause_generation(mode=mode, clear_cache=clear_cache))
                return {"status": "paused"}
            case Resume():
                await self._sent(llm.resume_generation())
                return {"status": "resumed"}
            case IsPaused():
                return {"is_paused": await self._sent(llm.is_paused())}
        async with self._turn:
            return await self._asked_in_one_go(operation)

    async def _asked_in_one_go(self, operation: Operation) -> dict[str, Any]:
        """Calls that wait for nothing but their own work, some of them several of vLLM's."""
        llm = self._engine
        match operation:
            case Abort(ids=ids):
                live = list(self._ids) if ids == "all" else [id for id in dict.fromkeys(ids) if id in self._ids]
                states = llm.output_processor.request_states
                queues = [state.queue for id in live if (state := states.get(self._ids[id])) is not None]
                await llm.abort([self._ids[id] for id in live])
                while any(queue.output is not None for queue in queues):
                    await asyncio.sleep(0)  # what was handed to the client before the answer is read before it
                return {"aborted": len(live)}
            case ResetPrefixCache():
                if not await llm.reset_prefix_cache():
                    raise CallRefused("busy", "vLLM answers false: blocks are held")
                return {"status": "reset"}
            case StartWeightUpdate():
                return await self._start_update(operation)
            case UpdateWeights():
                return await self._update(operation)
            case FinishWeightUpdate():
                return await self._finish_update(operation)
            case SwapWeights(source=source, version=version, fails=fails):
                await self._start_update(StartWeightUpdate())
                await self._update(UpdateWeights(source=source, fails=fails))
                return await self._finish_update(FinishWeightUpdate(version=version))
            case UpdateWeightVersion(version=version):
                await llm.update_weight_version(version)
                return {"weight_version": version}
            case _:
                raise TypeError(f"no engine is asked for {operation.verb}")

    async def _sent(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Make a call of one message, and let the next have its turn once that is sent: it may come back much later."""
        waiting = self._engine.engine_core.utility_results  # type: ignore[attr-defined]
        async with self._turn:
            before, task = set(waiting), asyncio.ensure_future(call)
            while not task.done() and before.issuperset(waiting):
                await asyncio.sleep(0)
        return await task

    async def _generate(self, submit: Submit, heard: Hear) -> dict[str, Any]:
        if submit.id in self._ids:
            raise CallRefused(
                "invalid", f"{submit.id} is live: vLLM would take it for another request, and a client could not tell them apart"
            )
        self._submissions += 1
        self._ids[submit.id] = id = f"{submit.id}-{self._submissions}"
        prompt: Any = {"prompt_token_ids": list(submit.prompt.token_ids or ())}
        if submit.cache_salt is not None:
            prompt["cache_salt"] = submit.cache_salt
        count, completion = 0, None
        known = self._engine.output_processor.request_states
        try:
            outputs = self._engine.generate(prompt, self._params(submit), id)
            async with self._turn:
                first = asyncio.ensure_future(anext(outputs))
                while not first.done() and id not in known:
                    await asyncio.sleep(0)
            async for output in _with(first, outputs):
                (completion,) = output.outputs
                heard(_news(submit.id, count, tuple(completion.token_ids), completion.finish_reason))
                count += len(completion.token_ids)
        except INVALID as error:
            raise CallRefused("invalid", str(error)) from error
        finally:
            del self._ids[submit.id]
        assert completion is not None, "generate() ended without an output"
        spans = getattr(completion, "weight_versions", None)  # up to 0.31 there are none
        return {
            "finish_reason": completion.finish_reason,
            "prompt_tokens": len(prompt["prompt_token_ids"]),
            "output_tokens": count,
            **({} if spans is None else {"weight_versions": [[span.version, span.start, span.end] for span in spans]}),
        }

    def _params(self, submit: Submit) -> SamplingParams:
        return SamplingParams(
            temperature=submit.temperature,
            top_p=submit.top_p,
            top_k=submit.top_k,
            min_p=submit.min_p,
            seed=submit.seed,
            max_tokens=submit.max_tokens,
            ignore_eos=True,
            stop_token_ids=None if submit.ignore_eos else list(self._eos),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )

    # ---- weights ----

    async def _start_update(self, start: StartWeightUpdate) -> dict[str, Any]:
        await self._phase(self._engine.start_weight_update, refused=self._session_open, fails=start.fails)
        self._session_open = True
        return {"status": "started"}

    async def _update(self, update: UpdateWeights) -> dict[str, Any]:
        was_open, self._session_open = self._session_open, False
        self._dirty = self._dirty or was_open
        await self._phase(lambda: self._engine.update_weights(_update(update)), refused=not was_open)
        self._session_open = True
        return {"status": "updated"}

    async def _finish_update(self, finish: FinishWeightUpdate) -> dict[str, Any]:
        await self._phase(lambda: self._engine.finish_weight_update(finish.version), refused=not self._session_open, fails=finish.fails)
        self._session_open = False
        return {"status": "finished", "weight_version": await self._engine.get_weight_version()}

    async def _phase(self, phase: Callable[[], Any], *, refused: bool, fails: bool = False) -> None:
        """One phase of a session. vLLM says an error in words alone: whether it was in the wrong state is known from the calls before."""
        if fails:
            await self._engine.collective_rpc("fail_next_phase")
        try:
            await phase()
        except EngineDeadError:
            raise
        except Exception as error:
            code: ErrorCode = "conflict" if refused else "failed"
            raise CallRefused(code, str(error)) from error
        finally:
            if fails:
                await self._engine.collective_rpc("forget_failure")


def _start(kind: started.Kind, limits: started.Limits, shape: EngineShape) -> AsyncLLM:
    """A new engine.

    Raises:
        BackendError: vLLM refuses the checkpoint or the shape.
    """
    live_worker.register()
    os.environ[live_worker.PLAIN_ATTENTION] = "1" if started.needs_plain_attention(kind) else ""
    try:
        config = AsyncEngineArgs(
            **started.arguments(kind, limits, shape),
            distributed_executor_backend="uni",
            scheduler_cls=f"harness.backends.vllm.recorder.{'LiveAsyncRecorder' if kind.async_scheduling else 'LiveRecorder'}",
            worker_extension_cls="harness.backends.vllm.live_worker.Extension",
            weight_transfer_config=WeightTransferConfig(backend=live_worker.NAME),
        ).create_engine_config()
        # The CPU platform switches it off; the engine's process has no say in it.
        config.scheduler_config.async_scheduling = kind.async_scheduling
        return LabelledLLM(vllm_config=config, executor_class=Executor.get_class(config), log_stats=False)
    except Exception as error:
        raise BackendError(f"vLLM does not start with checkpoint {kind.checkpoint} and {limits}: {error}") from error


async def _with(first: asyncio.Future[Any], rest: AsyncIterator[Any]) -> AsyncIterator[Any]:
    yield await first
    async for output in rest:
        yield output


def _update(update: UpdateWeights) -> WeightTransferUpdateRequest:
    return WeightTransferUpdateRequest(update_info=update.model_dump(mode="json", exclude_none=True))


def _news(request: str, first: int, tokens: tuple[int, ...], reason: Any) -> list[Output]:
    """vLLM joins outputs that nobody has taken yet, the end of an aborted request, too, which has no tokens."""
    if reason != "abort" or not tokens:
        return [Output(request, first, tokens, reason)]
    return [Output(request, first, tokens, None), Output(request, first + len(tokens), (), reason)]
