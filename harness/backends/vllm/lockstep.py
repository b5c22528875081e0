"""vLLM in lockstep: what its engine process does with a message, done here a call at a time.

Steps, queues, blocks, sessions and refusals are vLLM's. What vLLM leaves to whoever drives its core is
done as its own process does it (`EngineCoreProc`): a pause sets the scheduler's state and completes at once if that leaves no work;
steps go on while there is work, and where the loop looks for some and finds none, pending completions run, the newest first.
A step that is in flight is work.
"""

# pyright: reportMissingImports=false
# vLLM is not among what lint installs.

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import vllm.exceptions
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.request import RequestStatus

from harness import events as ev
from harness.backends import CannotRun, EngineInfo
from harness.backends.torch_weights import Refused, WeightSources
from harness.backends.vllm import started
from harness.backends.vllm.install import installed
from harness.backends.vllm.transitions import Transitions, name_of
from harness.backends.vllm.weights import SENDER
from harness.checkpoints import ensure
from harness.operations import (
    DRIVER_VERBS,
    Abort,
    FinishWeightUpdate,
    IsPaused,
    Operation,
    Pause,
    ResetPrefixCache,
    Resume,
    StartWeightUpdate,
    Submit,
    SwapWeights,
    UpdateWeights,
    UpdateWeightVersion,
    WeightSource,
)
from harness.scenario import EngineShape
from harness.state import EngineState, RequestState, Status
from harness.tokenizer import bytes_of, tokenizer_of

Answer = dict[str, Any]

INVALID = (ValueError, getattr(vllm.exceptions, "VLLMValidationError", ValueError))
"""What vLLM's front end raises for a request that it does not take; up to 0.31 its own errors are ValueErrors."""

_STATUS: dict[str, Status] = {"WAITING": "waiting", "RUNNING": "running", "PREEMPTED": "preempted"}


class VllmBackend:
    """The whole engine: scheduler, block manager, model."""

    name = "vllm"
    level = 2
    made_up: ClassVar[bool] = False

    def start(self, shape: EngineShape) -> EngineInfo:
        if shape.host_blocks:
            raise CannotRun(
                f"engine `{self.name}` has no host tier, the scenario asks for {shape.host_blocks} host_blocks: use sim or torch"
            )
        version, profile, note = installed()
        checkpoint = ensure(shape.checkpoint)
        self._tokenizer = tokenizer_of(checkpoint)
        self._sources = WeightSources(checkpoint)
        self._eos = eos_token_ids(checkpoint)
        self._started = started.started(shape, checkpoint, made_up=self.made_up)
        self._llm, self._core = self._started.llm, self._started.core
        self._scheduler = self._started.configure(shape)
        self._transitions = Transitions(self._scheduler, called=name_of)
        self._reports_spans = profile.reports_spans
        self._mode: ev.Mode | None = None
        self._effective = False
        self._pending: list[tuple[int, bool]] = []
        """Pause calls that have not returned, each with its clear_cache; the newest last."""
        self._parked: set[str] = set()
        self._submissions = 0
        self._ids: dict[str, str] = {}
        """What vLLM calls each live request: an id used again is another request, of which a late step must not know."""
        self._delivered: dict[str, int] = {}
        """Output tokens handed out so far, of each live request."""
        self._died = self._wrote = self._dirty = False
        """The session that was opened last has written; the weights are not those that the engine started with."""
        versions = {"vllm": version, **({"note": note} if note else {}), **self._libraries()}
        return EngineInfo(versions=versions, device=self._device(), profile=profile.name, eos_token_ids=self._eos)

    def tokenize(self, text: str) -> tuple[int, ...]:
        return self._tokenizer.encode(text) if self._tokenizer else bytes_of(text)

    def cannot(self, operation: Operation) -> str | None:
        """What vLLM in this process cannot: give memory back, and be sent a bad tensor in the middle of a part, which it takes whole."""
        if operation.verb not in self.verbs:
            return f"{operation.verb}: memory that vLLM can give back and map again is a GPU's, in a process of its own"
        if isinstance(operation, UpdateWeights | SwapWeights) and operation.source.spoil is not None:
            return "be sent a bad tensor: a part is handed to vLLM's loader whole, when the session is finished"
        return None

    def apply(self, op: int, operation: Operation) -> list[ev.Event]:
        self._transitions.add(ev.Received(op=op))
        answer: Answer | None = None
        error: ev.Failure | None = None
        try:
            answer = self._handlers[type(operation)](self, op, operation)
        except Refused as refusal:
            error = ev.Failure(refusal.code, str(refusal))
        if answer is not None or error is not None:
            self._transitions.add(ev.Returned(op=op, answer=answer, error=error))
        return self._transitions.take()

    def has_work(self) -> bool:
        return not self._died and (self._busy or bool(self._pending))

    def step(self) -> list[ev.Event]:
        if not self._busy:
            self._complete_pauses()
            return self._transitions.take()
        try:
            outputs = self._llm.step()
        except Exception as error:
            self._died = True
            self._transitions.add(ev.StepFailed(step=self._transitions.steps, why=f"{type(error).__name__}: {error}"))
            return self._transitions.take()
        self._deliver(outputs)
        if not self._busy:
            self._complete_pauses()
        return self._transitions.take()

    def state(self) -> EngineState:
        scheduler = self._scheduler
        pool = scheduler.kv_cache_manager.block_pool
        return EngineState(
            running=tuple([self._request_state(request) for request in scheduler.running]),
            waiting=tuple([self._request_state(request) for request in scheduler.waiting]),
            blocked=(),
            references=tuple([block.ref_cnt for block in pool.blocks[1:]]),
            digests=_digests(pool),
            free=tuple([block.block_id - 1 for block in pool.free_block_queue.get_all_free_blocks()]),
            pause_mode=self._mode,
            pause_pending=self._mode is not None and not self._effective,
            weight_version=self._version(),
            update_open=self._started.worker._weight_update_active,
            out_of_service=False,
        )

    def stop(self) -> None:
        if (standing := self.__dict__.pop("_started", None)) is None or started.is_gone(standing):
            return
        if self._died:
            started.drop()
            return
        try:
            if standing.worker._weight_update_active or self._dirty:
                self._restore_weights(standing)
            standing.settle()
        except Exception:  # what a failed update leaves of a model may not take weights any more: the next case gets a fresh engine
            started.drop()

    # ---- pauses, as EngineCoreProc has them ----

    @property
    def _busy(self) -> bool:
        return self._scheduler.has_requests() or bool(self._core.batch_queue)

    def _pause(self, op: int, operation: Pause) -> Answer | None:
        """The answer; None if the call returns later."""
        self._transitions.add(ev.PausePending(mode=operation.mode, clear_cache=operation.clear_cache))
        if operation.mode == "abort":
            live = list(self._ids)
            self._scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
            self._deliver_aborted(live)
        elif operation.mode == "wait":
            self._parked.clear()
        self._mode, self._effective = operation.mode, False
        self._scheduler.set_pause_state(PauseState.PAUSED_ALL if operation.mode == "keep" else PauseState.PAUSED_NEW)
        if self._busy:
            self._pending.append((op, operation.clear_cache))
            return None
        self._complete_pause(operation.clear_cache)
        return {"status": "paused"}

    def _complete_pauses(self) -> None:
        while self._pending:
            op, clear_cache = self._pending.pop()
            self._complete_pause(clear_cache)
            self._transitions.add(ev.Returned(op=op, answer={"status": "paused"}, error=None))

    def _complete_pause(self, clear_cache: bool) -> None:
        self._finish_pause(clear_cache)
        if self._mode is not None and not self._effective:
            self._effective = True
            self._transitions.add(ev.PauseEffective(mode=self._mode, clear_cache=clear_cache))

    def _finish_pause(self, clear_cache: bool) -> None:
        if hasattr(self._core, "_finish_pause"):  # from 0.29 on
            self._core._finish_pause(clear_cache)
        elif clear_cache:
            self._core._reset_caches()

    def _resume(self, op: int, operation: Resume) -> Answer:
        self._scheduler.set_pause_state(PauseState.UNPAUSED)
        if self._mode is not None:
            self._mode = None
            self._parked.clear()
            self._transitions.add(ev.Resumed())
        return {"status": "resumed"}

    def _is_paused(self, op: int, operation: IsPaused) -> Answer:
        return {"is_paused": self._core.is_scheduler_paused()}

    def _reset_prefix_cache(self, op: int, operation: ResetPrefixCache) -> Answer:
        if not self._llm.reset_prefix_cache():
            raise Refused("busy", "vLLM answers false: blocks are held")
        return {"status": "reset"}

    # ---- requests ----

    def _submit(self, op: int, operation: Submit) -> Answer:
        if operation.id in self._ids:
            raise Refused(
                "invalid", f"{operation.id} is live: vLLM would take it for another request, and a client could not tell them apart"
            )
        self._submissions += 1
        id = f"{operation.id}-{self._submissions}"
        prompt: Any = {"prompt_token_ids": list(operation.prompt.token_ids or ())}
        if operation.cache_salt is not None:
            prompt["cache_salt"] = operation.cache_salt
        try:
            params = SamplingParams(
                temperature=0,
                max_tokens=operation.max_tokens,
                ignore_eos=True,
                stop_token_ids=None if operation.ignore_eos else list(self._eos),
                detokenize=False,
                output_kind=RequestOutputKind.DELTA,
            )
            self._llm.add_request(id, prompt, params)
        except INVALID as error:
            raise Refused("invalid", str(error)) from error
        late = self._mode is not None
        if late:
            self._parked.add(operation.id)
        self._ids[operation.id], self._delivered[operation.id] = id, 0
        self._transitions.add(ev.Accepted(request=operation.id, parked=late))
        return {"state": "parked" if late else "queued"}

    def _abort(self, op: int, operation: Abort) -> Answer:
        """One at a time: of several ids in one call vLLM's order is that of a set, another in every process."""
        ids = list(self._ids) if operation.ids == "all" else [id for id in dict.fromkeys(operation.ids) if id in self._ids]
        for id in ids:
            self._core.abort_requests([self._ids[id]])
        self._deliver_aborted(ids)
        return {"aborted": len(ids)}

    def _deliver_aborted(self, ids: list[str]) -> None:
        """The outputs that vLLM's process sends for aborted requests, through its front end."""
        outputs = [EngineCoreOutput(self._ids[id], [], finish_reason=FinishReason.ABORT) for id in ids]
        self._deliver(self._llm.output_processor.process_outputs(outputs).request_outputs)

    def _deliver(self, request_outputs: list[Any]) -> None:
        outputs = []
        for output in request_outputs:
            completion = output.outputs[0]
            id, tokens = name_of(output), tuple(completion.token_ids)
            outputs.append(ev.Output(id, self._delivered[id], tokens, completion.finish_reason))
            self._delivered[id] += len(tokens)
            if output.finished:
                del self._ids[id], self._delivered[id]
                self._parked.discard(id)
                if self._reports_spans:
                    self._transitions.report_spans(id, completion.weight_versions or ())
        if outputs:
            self._transitions.add(ev.Delivered(outputs=tuple(outputs)))

    # ---- weights, through vLLM's own sessions ----

    def _start(self, op: int, operation: StartWeightUpdate) -> Answer:
        self._phase("start", "start_weight_update", fails=operation.fails)
        self._wrote = False
        self._transitions.add(ev.UpdateStarted())
        return {"status": "started"}

    def _update(self, op: int, operation: UpdateWeights) -> Answer:
        self._receive(operation.source, operation.part, operation.of, fails=operation.fails)
        return {"status": "updated"}

    def _receive(self, source: WeightSource, part: int, of: int, *, fails: bool) -> None:
        SENDER.tensors = self._tensors(source, part, of)
        self._phase("update", "update_weights", ({},), fails=fails)
        self._wrote = self._dirty = True
        self._transitions.add(ev.PartReceived(part=part, of=of, tensors=SENDER.sent, bytes=SENDER.sent_bytes))

    def _tensors(self, source: WeightSource, part: int, of: int) -> Any:
        return self._sources.part(source, part, of)

    def _finish(self, op: int, operation: FinishWeightUpdate) -> Answer:
        self._phase("finish", "finish_weight_update", fails=operation.fails)
        if operation.version is not None:
            self._label(operation.version)
        self._transitions.add(ev.Committed(version=self._version()))
        return {"status": "finished", "weight_version": self._version()}

    def _swap(self, op: int, operation: SwapWeights) -> Answer:
        self._start(op, StartWeightUpdate())
        self._receive(operation.source, 1, 1, fails=operation.fails)
        return self._finish(op, FinishWeightUpdate(version=operation.version))

    def _phase(self, phase: Any, method: str, args: tuple = (), *, fails: bool) -> None:
        """One phase of a session, carried out by vLLM's worker, which also says who may call it now."""
        refusable = self._started.worker._weight_update_active == (phase == "start")
        SENDER.fails = fails
        try:
            self._core.collective_rpc(method, args=args)
        except Exception as error:
            if refusable:
                raise Refused("conflict", str(error)) from error
            wrote = phase == "update" or (phase == "finish" and self._wrote)
            self._wrote, self._dirty = self._wrote or wrote, self._dirty or wrote
            self._transitions.add(ev.UpdateFailed(phase=phase, wrote=wrote, why=f"{type(error).__name__}: {error}"))
            raise Refused("failed", f"{method}: {error}") from error
        finally:
            SENDER.fails = False

    def _relabel(self, op: int, operation: UpdateWeightVersion) -> Answer:
        self._label(operation.version)
        self._transitions.add(ev.Relabelled(version=operation.version))
        return {"weight_version": operation.version}

    def _label(self, version: str) -> None:
        # Up to 0.26 the front end has no such call.
        getattr(self._llm, "set_weight_version", self._core.set_weight_version)(version)

    def _version(self) -> str:
        return self._core._weight_version

    def _restore_weights(self, standing: started.Started) -> None:
        """The weights that the engine started with, by one more session."""
        if not standing.worker._weight_update_active:
            self._core.collective_rpc("start_weight_update")
        SENDER.tensors = self._tensors(WeightSource(original=True), 1, 1)
        self._core.collective_rpc("update_weights", args=({},))
        self._core.collective_rpc("finish_weight_update")

    # ---- what it says of itself ----

    def _libraries(self) -> dict[str, str]:
        import torch
        import transformers

        return {"torch": str(torch.__version__), "transformers": transformers.__version__}

    def _device(self) -> str:
        import torch
        from vllm.platforms import current_platform

        device = "cpu" if current_platform.is_cpu() else torch.cuda.get_device_name()
        return f"{device}, plain attention" if self._started.plain_attention else device

    def _request_state(self, request: Any) -> RequestState:
        id = name_of(request)
        return RequestState(
            id=id,
            status=_STATUS[request.status.name],
            num_prompt_tokens=request.num_prompt_tokens,
            output=tuple(request.output_token_ids),
            num_computed_tokens=request.num_computed_tokens,
            num_preemptions=request.num_preemptions,
            num_output_placeholders=request.num_output_placeholders,
            blocks=tuple([block - 1 for block in self._scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]]),
            parked=id in self._parked,
        )

    _handlers: ClassVar[dict[type[Operation], Callable[..., Answer | None]]] = {
        Submit: _submit,
        Abort: _abort,
        Pause: _pause,
        Resume: _resume,
        IsPaused: _is_paused,
        ResetPrefixCache: _reset_prefix_cache,
        StartWeightUpdate: _start,
        UpdateWeights: _update,
        FinishWeightUpdate: _finish,
        SwapWeights: _swap,
        UpdateWeightVersion: _relabel,
    }
    verbs: ClassVar[frozenset[str]] = frozenset(kind.verb for kind in (*DRIVER_VERBS, *_handlers))
    """What it can be asked."""


class VllmSchedulerBackend(VllmBackend):
    """Its scheduler and block manager; tokens are made up, weights are a number."""

    name = "vllm-scheduler"
    made_up = True

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed

    def start(self, shape: EngineShape) -> EngineInfo:
        info = super().start(shape)
        executor = self._core.model_executor
        executor.scheduler, executor.seed = self._scheduler, self._seed
        executor.worker.transfer.epoch = 0
        return info._replace(device="none")

    def _tensors(self, source: WeightSource, part: int, of: int) -> Any:
        return ()

    def _restore_weights(self, standing: started.Started) -> None:
        standing.worker._weight_update_active = False


def _digests(pool: Any) -> tuple[tuple[int, ...], ...]:
    """Blocks that share a hash, as EngineState has them."""
    groups = [
        tuple([block - 1 for block in entry]) if isinstance(entry, dict) else (entry.block_id - 1,)
        for entry in pool.cached_block_hash_to_block._cache.values()
    ]
    return tuple(sorted(groups, key=min))


def eos_token_ids(checkpoint: Path) -> tuple[int, ...]:
    """End-of-sequence tokens, of generation_config.json or else config.json: the adapter hands them over as stop tokens."""
    for name in ("generation_config.json", "config.json"):
        file = checkpoint / name
        ids = json.loads(file.read_text()).get("eos_token_id") if file.is_file() else None
        if ids is not None:
            return tuple(ids) if isinstance(ids, list) else (ids,)
    return ()
