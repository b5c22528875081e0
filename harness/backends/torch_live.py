"""Our own engine running by itself: AsyncLLM, called as its users call it, with a recorder inside its core's loop."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
import transformers

from engine import CALL_NOTE, AsyncLLM, EngineConfig, EngineDeadError, EngineError, ObserverFactory, SamplingParams
from harness.backends import Answer, BackendError, CallRefused, EngineInfo, opened_event
from harness.backends.torch import TorchCalculator
from harness.backends.torch_recorder import CLOSE, SENT
from harness.backends.torch_weights import NamedTensor, Refused, WeightSources, contents
from harness.checkpoints import ensure
from harness.events import Entry, Output, Reference
from harness.golden import references
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
    to_data,
)
from harness.scenario import EngineShape
from harness.tokenizer import bytes_of, tokenizer_of

Hear = Callable[[Sequence[Output]], None]


class TorchLive:
    """`AsyncLLM` behind the methods of a live backend.

    Args:
        in_process: the core has a thread of this process, instead of a process of its own.
    """

    level = 2

    def __init__(self, *, in_process: bool = False) -> None:
        self.name = "torch-live-inproc" if in_process else "torch-live"
        self._in_process = in_process
        self._llm: AsyncLLM | None = None

    async def start(self, shape: EngineShape, folder: Path) -> EngineInfo:
        await self.stop()
        if shape.device == "cuda" and not torch.cuda.is_available():
            raise BackendError("the scenario's engine asks for device cuda, and torch sees none; use --set engine.device=cpu")
        checkpoint = ensure(shape.checkpoint)
        transformers.utils.logging.disable_progress_bar()
        self._tokenizer = tokenizer_of(checkpoint)
        self._weights = WeightSources(checkpoint)
        self._made: dict[Operation, Sent] = {}
        try:
            self._config = EngineConfig(checkpoint=checkpoint, **shape.model_dump(exclude={"checkpoint"}))
            self._llm = AsyncLLM.from_config(self._config, in_process=self._in_process, observer=self._recorder("Recorder", shape, folder))
        except (ValueError, EngineDeadError) as error:
            raise BackendError(str(error)) from error
        return _info(shape)._replace(eos_token_ids=self._llm.eos_token_ids, vocab_size=self._llm.vocab_size)

    def recorder(self, shape: EngineShape, folder: Path) -> ObserverFactory:
        """What records an engine of this shape, whoever asks it for what, in `folder`, which must not hold such a log.

        A fault of the recorder ends the recording alone; in a run of ours (`start`) it is an error.
        """
        return self._recorder("GuardedRecorder", shape, folder)

    def _recorder(self, kind: str, shape: EngineShape, folder: Path) -> ObserverFactory:
        opened = opened_event(shape, self, _info(shape), digest="", seed=0, clock_base_ns=time.monotonic_ns())
        arguments: dict[str, object] = {"folder": str(folder.absolute()), "opened": msgspec.json.encode(opened).decode()}
        return ObserverFactory(f"harness.backends.torch_recorder:{kind}", arguments)

    def tokenize(self, text: str) -> tuple[int, ...]:
        return self._tokenizer.encode(text) if self._tokenizer else bytes_of(text)

    def cannot(self, operation: Operation) -> str | None:
        return None

    def prepare(self, operation: Operation) -> None:
        if isinstance(operation, UpdateWeights | SwapWeights):
            with suppress(Refused):  # The call is refused for the same reason.
                self._sent(operation)

    async def call(self, operation: Operation, heard: Hear) -> Answer:
        assert self._llm is not None, "a call before start"
        try:
            CALL_NOTE.set(json.dumps({**to_data(operation), **self._told(operation)}))
            return Answer(await self._asked(self._llm, operation, heard))
        except EngineDeadError:
            raise
        except (EngineError, Refused) as refusal:
            raise CallRefused(refusal.code, str(refusal)) from refusal  # type: ignore[arg-type]

    async def end(self, why: str) -> None:
        """The last call that the recorder hears of. A dead core's log ends where it died."""
        if self._llm is None or self._llm.dead_error is not None:
            return
        CALL_NOTE.set(json.dumps({CLOSE: why}))
        try:
            await self._llm.get_weight_version()
        except EngineDeadError:
            return
        finally:
            CALL_NOTE.set("")

    async def stop(self) -> None:
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None

    def references(self, entries: Sequence[Entry]) -> list[Reference]:
        return references(entries, lambda num_slots: TorchCalculator(self._config, self._weights, num_slots))

    async def _asked(self, llm: AsyncLLM, operation: Operation, heard: Hear) -> dict[str, Any]:
        """The answer as docs/semantics.md has it; AsyncLLM returns what Python callers want."""
        match operation:
            case Submit():
                return await self._generate(llm, operation, heard)
            case Abort(ids=ids):
                return {"aborted": await llm.abort(None if ids == "all" else ids)}
            case Pause(mode=mode, clear_cache=clear_cache):
                await llm.pause_generation(mode=mode, clear_cache=clear_cache)
                return {"status": "paused"}
            case Resume():
                await llm.resume_generation()
                return {"status": "resumed"}
            case IsPaused():
                return {"is_paused": await llm.is_paused()}
            case Sleep(level=level, mode=mode):
                await llm.sleep(level, mode)
                return {"status": "sleeping"}
            case WakeUp(tags=tags):
                return {"status": "awake" if await llm.wake_up(tags) else "sleeping"}
            case IsSleeping():
                return {"is_sleeping": await llm.is_sleeping()}
            case ResetPrefixCache():
                await llm.reset_prefix_cache()
                return {"status": "reset"}
            case StartWeightUpdate(allow_unpaused=allow_unpaused):
                await llm.start_weight_update(allow_unpaused=allow_unpaused)
                return {"status": "started"}
            case UpdateWeights(part=part, of=of):
                await llm.update_weights(self._sent(operation).tensors, part=part, of=of)
                return {"status": "updated"}
            case FinishWeightUpdate(version=version):
                return {"status": "finished", "weight_version": await llm.finish_weight_update(version)}
            case SwapWeights(version=version):
                return {"status": "finished", "weight_version": await llm.load_weights(self._sent(operation).tensors, version)}
            case UpdateWeightVersion(version=version, allow_unpaused=allow_unpaused):
                await llm.update_weight_version(version, allow_unpaused=allow_unpaused)
                return {"weight_version": version}
            case _:
                raise TypeError(f"no engine is asked for {operation.verb}")

    async def _generate(self, llm: AsyncLLM, submit: Submit, heard: Hear) -> dict[str, Any]:
        fields = submit.model_dump(exclude={"id", "prompt"})
        prompt = submit.prompt.token_ids or ()
        count, completion = 0, None
        async for news in llm.generate(prompt, SamplingParams(**fields, output_kind="delta"), submit.id):
            (completion,) = news.outputs
            heard(_outputs(submit.id, count, tuple(completion.token_ids), completion.finish_reason))
            count += len(completion.token_ids)
        assert completion is not None, "generate() ended without an output"
        return {
            "finish_reason": completion.finish_reason,
            "prompt_tokens": len(prompt),
            "output_tokens": count,
            "weight_versions": [list(span) for span in completion.weight_versions or ()],
        }

    def _told(self, operation: Operation) -> dict[str, Any]:
        """What goes with the operation for the recorder."""
        return {SENT: self._sent(operation).contents} if isinstance(operation, UpdateWeights | SwapWeights) else {}

    def _sent(self, operation: UpdateWeights | SwapWeights) -> Sent:
        """Made once, and before the run if that was asked for: the time that it takes is not the engine's."""
        if operation not in self._made:
            part, of = (operation.part, operation.of) if isinstance(operation, UpdateWeights) else (1, 1)
            tensors = list(self._weights.part(operation.source, part, of))
            tensors = list(_breaking(tensors)) if operation.fails else tensors
            dtype = getattr(torch, self._config.dtype)
            self._made[operation] = Sent(tensors, {name: contents(tensor, dtype) for name, tensor in tensors})
        return self._made[operation]


class Sent(NamedTuple):
    """What a call sends."""

    tensors: list[NamedTensor]
    contents: dict[str, str]
    """By name, what a recorder at the other end is told that the tensor holds."""


def _info(shape: EngineShape) -> EngineInfo:
    """What is known before the engine stands."""
    device = torch.cuda.get_device_name() if shape.device == "cuda" else "cpu"
    return EngineInfo({"torch": str(torch.__version__), "transformers": transformers.__version__}, device, "caesura", ())


def _outputs(request: str, first: int, tokens: tuple[int, ...], reason: Any) -> list[Output]:
    """News of a request; AsyncLLM joins what nobody took, the end of an aborted request, too, which has no tokens."""
    if reason != "abort" or not tokens:
        return [Output(request, first, tokens, reason)]
    return [Output(request, first, tokens, None), Output(request, first + len(tokens), (), reason)]


def _breaking(tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """The first tensor, then one that no engine has a place for: the update breaks after its first byte."""
    name, tensor = next(iter(tensors))
    yield name, tensor
    yield f"{name}.told.to.fail", tensor
