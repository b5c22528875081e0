"""Our own engine in lockstep: its observer's calls become events, its visible state is read between calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Literal

import torch
import transformers

from engine.attention import KVCache
from engine.config import EngineConfig, SamplingParams
from engine.core import EngineCore
from engine.device import to_device
from engine.errors import EngineError, ForwardFailed
from engine.model_runner import load_model, probe_layers
from engine.observer import Observer
from engine.outputs import PauseTicket
from engine.request import Request, RequestStatus
from engine.sampler import Draw, sample, stream_of
from engine.tiles import Rows, TiledModel
from engine.weights import WeightTarget
from harness import events as ev
from harness.backends import BackendError, EngineInfo
from harness.backends.torch_weights import FailingTarget, Refused, WeightAudit, WeightSources, breaking
from harness.checkpoints import ensure
from harness.golden import Part, references
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
from harness.scenario import EngineShape
from harness.state import EngineState, RequestState, Status
from harness.tokenizer import bytes_of, tokenizer_of

Answer = dict[str, Any]


class TorchBackend:
    """`engine/` behind the methods of a backend."""

    name = "torch"
    level = 2

    def start(self, shape: EngineShape) -> EngineInfo:
        if shape.device == "cuda" and not torch.cuda.is_available():
            raise BackendError("the scenario's engine asks for device cuda, and torch sees none; use --set engine.device=cpu")
        folder = ensure(shape.checkpoint)
        transformers.utils.logging.disable_progress_bar()
        self._tokenizer = tokenizer_of(folder)
        self._transitions = Transitions()
        fields = shape.model_dump(exclude={"checkpoint"})
        try:
            self._config = EngineConfig(checkpoint=folder, **fields)
            self._core = EngineCore(self._config, observer=self._transitions)
        except ValueError as error:
            raise BackendError(str(error)) from error
        self._core.weight_target = self._target = FailingTarget(self._core.runner.model)
        self._weights = WeightSources(folder)
        self._audit = WeightAudit(self._core, folder)
        self._pauses: dict[int, PauseTicket] = {}
        self._parts_of: int | None = None
        self._parts: set[int] = set()
        device = torch.cuda.get_device_name() if shape.device == "cuda" else "cpu"
        versions = {"torch": str(torch.__version__), "transformers": transformers.__version__}
        return EngineInfo(versions, device, "caesura", self._core.eos_token_ids, self._core.runner.vocab_size)

    def tokenize(self, text: str) -> tuple[int, ...]:
        return self._tokenizer.encode(text) if self._tokenizer else bytes_of(text)

    def apply(self, op: int, operation: Operation) -> list[ev.Event]:
        answer: Answer | None = None
        error: ev.Failure | None = None
        try:
            answer = self._handlers[type(operation)](self, op, operation)
        except (EngineError, Refused) as refusal:
            error = ev.Failure(refusal.code, str(refusal))  # type: ignore[arg-type]
        done = [*self._superseded(), *map(self._audited, self._transitions.take()), *self._deliveries()]
        if op not in self._pauses:
            done.append(ev.Returned(op=op, answer=answer, error=error))
        return [ev.Received(op=op), *done, *self._complete_pause()]

    def has_work(self) -> bool:
        return self._core.has_work()

    def step(self) -> list[ev.Event]:
        # A broken forward pass is told by the engine's observer; the step ends there.
        with suppress(ForwardFailed):
            self._core.step()
        done = [*self._transitions.take(), *self._deliveries()]
        return [*done, *self._complete_pause()]

    def state(self) -> EngineState:
        core, scheduler, pool = self._core, self._core.scheduler, self._core.scheduler.pool
        return EngineState(
            running=tuple(map(_request_state, scheduler.running)),
            waiting=tuple(map(_request_state, scheduler.waiting)),
            blocked=tuple(request.request_id for request in scheduler.blocked),
            references=pool.references,
            digests=tuple(sorted((blocks for _, blocks in pool.digest_index), key=min)),
            free=pool.free_queue,
            pause_mode=core.pause_mode,
            pause_pending=core.pause_pending,
            weight_version=core.weight_version,
            update_open=core.update_open,
            out_of_service=core.is_out_of_service,
            asleep=core.asleep,
            sleep_level=core.sleep_level,
            host=scheduler.host.slots,
        )

    def references(self, entries: Sequence[ev.Entry]) -> list[ev.Reference]:
        return references(entries, lambda num_slots: TorchCalculator(self._config, self._weights, num_slots))

    def _audited(self, event: ev.Event) -> ev.Event:
        return self._audit.audited(event) if isinstance(event, ev.Committed) else event

    def stop(self) -> None:
        self.__dict__.pop("_core", None)

    def _superseded(self) -> Iterator[ev.Event]:
        """Pause and sleep calls that another call overrode return before anything else happens."""
        for op, ticket in list(self._pauses.items()):
            if ticket.error is not None:
                del self._pauses[op]
                yield ev.Returned(op=op, answer=None, error=ev.Failure("superseded", str(ticket.error)))

    def _complete_pause(self) -> Iterator[ev.Event]:
        """Pause calls return when the pause is effective, sleep calls when the engine is asleep too."""
        self._core.pause_complete()
        transitions = self._transitions.take()
        done = {op: ticket for op, ticket in self._pauses.items() if ticket.done}
        self._pauses = {op: ticket for op, ticket in self._pauses.items() if not ticket.done}
        yield from (event for event in transitions if not isinstance(event, ev.Asleep))
        yield from _returned([op for op, ticket in done.items() if ticket.sleep_level is None], "paused")
        yield from (event for event in transitions if isinstance(event, ev.Asleep))
        yield from _returned([op for op, ticket in done.items() if ticket.sleep_level is not None], "sleeping")

    def _deliveries(self) -> Iterator[ev.Event]:
        if outputs := self._core.take_outputs():
            yield ev.Delivered(outputs=tuple(ev.Output(o.request_id, o.first, o.token_ids, o.finish_reason) for o in outputs))

    # ---- one method for each operation: (op, operation) -> answer ----

    def _submit(self, op: int, operation: Submit) -> Answer:
        return {"state": self._core.submit(operation.id, operation.prompt.token_ids or (), _sampling_params(operation))}

    def _abort(self, op: int, operation: Abort) -> Answer:
        return {"aborted": self._core.abort(None if operation.ids == "all" else operation.ids)}

    def _pause(self, op: int, operation: Pause) -> None:
        self._pauses[op] = self._core.begin_pause(operation.mode, clear_cache=operation.clear_cache)

    def _sleep(self, op: int, operation: Sleep) -> None:
        self._pauses[op] = self._core.begin_sleep(operation.level, operation.mode)

    def _wake_up(self, op: int, operation: WakeUp) -> Answer:
        self._core.wake_up(operation.tags)
        return {"status": "sleeping" if self._core.is_sleeping() else "awake"}

    def _is_sleeping(self, op: int, operation: IsSleeping) -> Answer:
        return {"is_sleeping": self._core.is_sleeping()}

    def _resume(self, op: int, operation: Resume) -> Answer:
        self._core.resume()
        return {"status": "resumed"}

    def _is_paused(self, op: int, operation: IsPaused) -> Answer:
        return {"is_paused": self._core.is_paused()}

    def _reset_prefix_cache(self, op: int, operation: ResetPrefixCache) -> Answer:
        self._core.reset_prefix_cache()
        return {"status": "reset"}

    def _start(self, op: int, operation: StartWeightUpdate) -> Answer:
        with self._target.failing("begin" if operation.fails else None):
            self._core.start_weight_update(allow_unpaused=operation.allow_unpaused)
        self._audit.begin()
        self._parts_of, self._parts = None, set()
        return {"status": "started"}

    def _update(self, op: int, operation: UpdateWeights) -> Answer:
        if self._core.update_open and self._parts_of not in (None, operation.of):
            raise Refused("invalid", f"part {operation.part} of {operation.of}: this session's earlier parts are of {self._parts_of}")
        tensors = self._weights.part(operation.source, operation.part, operation.of)
        self._transitions.part, self._transitions.of = operation.part, operation.of
        self._core.update_weights(self._audit.note(breaking(tensors) if operation.fails else tensors))
        self._audit.accept()
        self._parts_of = operation.of
        self._parts.add(operation.part)
        return {"status": "updated"}

    def _finish(self, op: int, operation: FinishWeightUpdate) -> Answer:
        if self._core.update_open and self._parts_of is not None and len(self._parts) < self._parts_of:
            raise Refused("conflict", f"{len(self._parts)} of {self._parts_of} parts were sent; send the others before finish")
        with self._target.failing("commit" if operation.fails else None):
            self._core.finish_weight_update(operation.version)
        return {"status": "finished", "weight_version": self._core.weight_version}

    def _swap(self, op: int, operation: SwapWeights) -> Answer:
        tensors = self._weights.part(operation.source, 1, 1)
        self._transitions.part = self._transitions.of = 1
        self._audit.begin()
        self._core.load_weights(self._audit.note(breaking(tensors) if operation.fails else tensors), operation.version)
        self._audit.accept()
        return {"status": "finished", "weight_version": self._core.weight_version}

    def _relabel(self, op: int, operation: UpdateWeightVersion) -> Answer:
        self._core.update_weight_version(operation.version, allow_unpaused=operation.allow_unpaused)
        return {"weight_version": self._core.weight_version}

    _handlers: ClassVar[dict[type[Operation], Callable[..., Answer | None]]] = {
        Submit: _submit,
        Abort: _abort,
        Pause: _pause,
        Resume: _resume,
        IsPaused: _is_paused,
        ResetPrefixCache: _reset_prefix_cache,
        Sleep: _sleep,
        WakeUp: _wake_up,
        IsSleeping: _is_sleeping,
        StartWeightUpdate: _start,
        UpdateWeights: _update,
        FinishWeightUpdate: _finish,
        SwapWeights: _swap,
        UpdateWeightVersion: _relabel,
    }


class Transitions(Observer):
    """Turns the observer's calls into events. Digests become labels in the order of their first appearance.

    Args:
        called: what a request is called in the log, by its id; its id if not given.
    """

    def __init__(self, called: Callable[[str], str] = str) -> None:
        self._called = called
        self.part = self.of = 1
        """Which part of an update the engine is being sent."""
        self._events: list[ev.Event] = []
        self._labels: dict[Hashable, int] = {}

    def take(self) -> list[ev.Event]:
        events, self._events = self._events, []
        return events

    def accepted(self, request_id: str, *, parked: bool) -> None:
        self._events.append(ev.Accepted(request=self._called(request_id), parked=parked))

    def blocked(self, request_id: str) -> None:
        self._events.append(ev.Blocked(request=self._called(request_id)))

    def admitted(self, request_id: str, *, life: int, num_computed_tokens: int) -> None:
        self._events.append(ev.Admitted(request=self._called(request_id), life=life, computed=num_computed_tokens))

    def preempted(self, request_id: str, *, by: str | None) -> None:
        self._events.append(ev.Preempted(request=self._called(request_id), by=None if by is None else self._called(by)))

    def finished(
        self,
        request_id: str,
        *,
        reason: ev.FinishReason,
        num_prompt_tokens: int,
        num_output_tokens: int,
        spans: Sequence[tuple[str, int, int]],
    ) -> None:
        counts = {"prompt_tokens": num_prompt_tokens, "output_tokens": num_output_tokens}
        self._events.append(
            ev.Finished(request=self._called(request_id), reason=reason, **counts, spans=tuple(ev.VersionSpan(*span) for span in spans))
        )

    def hit(self, request_id: str, blocks: Sequence[int]) -> None:
        self._events.append(ev.Hit(request=self._called(request_id), blocks=tuple(blocks)))

    def allocated(self, request_id: str, blocks: Sequence[int], *, evicted: Sequence[int]) -> None:
        self._events.append(ev.Allocated(request=self._called(request_id), blocks=tuple(blocks), evicted=tuple(evicted)))

    def stored(self, request_id: str, blocks: Sequence[tuple[int, Hashable]]) -> None:
        labelled = tuple((block, self._labels.setdefault(digest, len(self._labels))) for block, digest in blocks)
        self._events.append(ev.Stored(request=self._called(request_id), blocks=labelled))

    def freed(self, request_id: str, *, head: Sequence[int], tail: Sequence[int]) -> None:
        self._events.append(ev.Freed(request=self._called(request_id), head=tuple(head), tail=tuple(tail)))

    def offloaded(self, blocks: Sequence[tuple[int, int]]) -> None:
        self._events.append(ev.Offloaded(blocks=tuple(blocks)))

    def loaded(self, request_id: str, blocks: Sequence[tuple[int, int]]) -> None:
        self._events.append(ev.Loaded(request=self._called(request_id), blocks=tuple(blocks)))

    def cleared(self, *, success: bool, empty: bool, tier: Literal["device", "host"] = "device") -> None:
        self._events.append(ev.Cleared(tier=tier, success=success, empty=empty))

    def launched(self, step: int, batch: Sequence[tuple[str, int, int]]) -> None:
        self._events.append(
            ev.Launched(step=step, batch=tuple(ev.Scheduled(self._called(request_id), first, count) for request_id, first, count in batch))
        )

    def landed(self, step: int, sampled: Sequence[tuple[str, int]]) -> None:
        self._events.append(
            ev.Landed(step=step, sampled=tuple(ev.Sampled(self._called(request_id), token) for request_id, token in sampled))
        )

    def dropped(self, step: int, request_id: str, *, why: ev.DropReason) -> None:
        self._events.append(ev.Dropped(step=step, request=self._called(request_id), why=why))

    def step_failed(self, step: int, *, why: str) -> None:
        self._events.append(ev.StepFailed(step=step, why=why))

    def pause_pending(self, mode: ev.Mode, *, clear_cache: bool) -> None:
        self._events.append(ev.PausePending(mode=mode, clear_cache=clear_cache))

    def pause_effective(self, mode: ev.Mode, *, clear_cache: bool) -> None:
        self._events.append(ev.PauseEffective(mode=mode, clear_cache=clear_cache))

    def resumed(self) -> None:
        self._events.append(ev.Resumed())

    def asleep(self, level: int, *, tags: Sequence[ev.Tag]) -> None:
        self._events.append(ev.Asleep(level=level, tags=tuple(tags)))

    def awake(self, *, tags: Sequence[ev.Tag]) -> None:
        self._events.append(ev.Awake(tags=tuple(tags)))

    def update_started(self) -> None:
        self._events.append(ev.UpdateStarted())

    def part_received(self, *, tensors: int, num_bytes: int) -> None:
        self._events.append(ev.PartReceived(part=self.part, of=self.of, tensors=tensors, bytes=num_bytes))

    def update_failed(self, phase: Literal["start", "update", "finish"], *, wrote: bool, why: str) -> None:
        self._events.append(ev.UpdateFailed(phase=phase, wrote=wrote, why=why))

    def committed(self, version: str) -> None:
        self._events.append(ev.Committed(version=version))

    def relabelled(self, version: str) -> None:
        self._events.append(ev.Relabelled(version=version))


class TorchCalculator:
    """A model of its own behind the methods of an oracle: the engine's model code, without its scheduler and pool.

    Each token has a block of its own in a KV cache made for them all, so nothing is ever freed or shared but by the oracle's will.
    """

    def __init__(self, config: EngineConfig, weights: WeightSources, num_slots: int) -> None:
        device = torch.device(config.device)
        self._model = TiledModel(load_model(config, device), device)
        self._target = WeightTarget(self._model.model)
        self._weights = weights
        layers = probe_layers(self._model, config)
        self._cache = KVCache(layers, num_blocks=num_slots, block_size=1, dtype=self._model.model.dtype, device=device)

    def write(self, part: Part) -> None:
        # An engine that took a tensor which it had to refuse is held against one that was sent a good one.
        good = part.source.model_copy(update={"spoil": None})
        for name, tensor in self._weights.part(good, part.part, part.of):
            self._target.write(self._target.resolve(name, tensor), tensor)

    def compute(self, submit: Submit, token_ids: Sequence[int], *, first: int, slots: Sequence[int], wanted: int) -> list[int]:
        params = _sampling_params(submit)
        stream = stream_of(params, submit.id)
        tokens: list[int] = []
        size = self._model.num_rows  # a tile at a time: the logits of a long sequence would not fit
        for start in range(0, len(token_ids), size):
            ids = to_device(token_ids[start : start + size], self._model.device)
            end = first + start + len(ids)
            num_logits = min(len(ids), max(0, start + len(ids) - (len(token_ids) - wanted)))
            logits = self._model.logits(self._cache, ids, [Rows(len(ids), first + start, slots[:end], num_logits)])
            tokens += sample(logits, [Draw(params, stream, at + 1) for at in range(end - num_logits, end)]).token_ids.tolist()
        return tokens


def _returned(ops: Iterable[int], status: str) -> Iterator[ev.Event]:
    return (ev.Returned(op=op, answer={"status": status}, error=None) for op in ops)


def _sampling_params(submit: Submit) -> SamplingParams:
    return SamplingParams(**submit.model_dump(exclude={"id", "prompt"}))


_STATUS: dict[RequestStatus, Status] = {
    RequestStatus.WAITING: "waiting",
    RequestStatus.RUNNING: "running",
    RequestStatus.PREEMPTED: "preempted",
}


def _request_state(request: Request) -> RequestState:
    return RequestState(
        id=request.request_id,
        status=_STATUS[request.status],
        num_prompt_tokens=request.num_prompt_tokens,
        output=request.output_token_ids,
        num_computed_tokens=request.num_computed_tokens,
        num_preemptions=request.num_preemptions,
        blocks=tuple(request.blocks),
        num_output_placeholders=request.num_output_placeholders,
        parked=request.parked,
    )
