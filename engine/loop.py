"""The life of a core that runs by itself: take calls up, make a turn, hand outputs over, complete pauses.

Calls are taken up between turns, so a call waits for at most one. What a pause call is answered with goes the same
way as outputs, behind them: whoever reads reports in order has all outputs before the pause returns, and nobody has to sleep.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, ClassVar

from . import messages as m
from .config import EngineConfig
from .connection import Buffer, ObserverFactory, Port, SentCall
from .core import EngineCore
from .errors import Conflict, EngineDeadError, EngineError, InvalidArgument
from .observer import Observer
from .outputs import PauseTicket
from .tensor_buffers import unpack
from .weights import NamedTensors, read_safetensors

logger = logging.getLogger(__name__)

Answer = dict[str, Any]
Buffers = Sequence[Buffer]


def serve(config: EngineConfig, observer: ObserverFactory | None, port: Port) -> None:
    """Make an engine and run it until it is told to stop. What goes wrong is reported through `port`, not raised."""
    try:
        watcher = make_observer(observer)
        core = EngineCore(config, observer=watcher)
        watcher.attached(core)
    except Exception as error:
        port.send(m.Stopped(why=_describe(error), invalid=isinstance(error, ValueError)))
        return
    port.send(m.Ready(eos_token_ids=core.eos_token_ids, vocab_size=core.runner.vocab_size))
    CoreLoop(core, watcher, port).run()


def make_observer(factory: ObserverFactory | None) -> Observer:
    """Raises: ValueError, when there is no such callable."""
    if factory is None:
        return Observer()
    module, _, name = factory.path.partition(":")
    try:
        make = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"no observer {factory.path!r} (expected 'module:callable'): {error}") from error
    return make(**factory.arguments)


class CoreLoop:
    """Drives one core on behalf of the far end of `port`."""

    def __init__(self, core: EngineCore, observer: Observer, port: Port) -> None:
        self._core = core
        self._observer = observer
        self._port = port
        self._tickets: dict[int, PauseTicket] = {}  # pause and sleep calls that are not answered yet, in order
        self._answers: dict[int, Answer] = {}  # what these will be answered with
        self._parts = _Parts()
        self._num_prompt_tokens = self._num_generated_tokens = 0
        self._shutdown: m.Shutdown | None = None
        self._stop_by = 0.0

    def run(self) -> None:
        """Returns when the engine was told to stop, or broke; either way `Stopped` was sent, and all outputs before it."""
        broke = False
        try:
            why = self._serve()
        except BaseException as error:
            logger.exception("the engine broke")
            why, broke = _describe(error), True
        try:
            self._observer.stopped(why, broke=broke)
        except Exception:
            logger.exception("the observer broke")
        self._port.send(m.Stopped(why=why))

    def _serve(self) -> str:
        """Returns: why it was told to stop."""
        while True:
            for sent in self._port.take(wait=self._shutdown is None and not self._core.has_work()):
                self._take_up(sent)
            if self._shutdown is not None and (not self._core.has_work() or monotonic() >= self._stop_by):
                break
            self._turn()
        if self._core.scheduler.requests:
            self._end_all(self._shutdown.call)
        while self._core.has_work():  # a step in flight
            self._turn()
        return self._shutdown.why

    def _end_all(self, call: int) -> None:
        """What is left is aborted, which completes every pending pause, too."""
        self._observer.called(call, "abort", {"request_ids": None}, note="")
        aborted = self._core.abort(None)
        self._hand_over()
        self._observer.returned(call, {"aborted": aborted}, None)
        self._settle()

    def _turn(self) -> None:
        if self._core.has_work():
            self._core.step()
            self._settle()

    def _take_up(self, sent: SentCall) -> None:
        call = sent.call
        if self._shutdown is not None and isinstance(call, m.Submit):
            refusal = EngineDeadError(f"the engine is shutting down ({self._shutdown.why}) and takes no requests on")
            self._port.send(m.Refusal.of(call.call, refusal))
            return
        self._observer.called(call.call, call.verb, call.arguments, note=call.note)
        answer: Answer | None = None
        error: EngineError | None = None
        try:
            answer = self._handlers[type(call)](self, call, sent.buffers)
        except EngineError as refusal:
            error = refusal
        self._hand_over()
        self._return_tickets()
        if call.call not in self._tickets:
            self._return(call.call, answer, error)
        self._settle()

    # ---- what goes back ----

    def _settle(self) -> None:
        """Hand outputs over, then let a pause that this was the last of take effect, then answer it."""
        self._hand_over()
        self._core.pause_complete()
        self._return_tickets()
        self._observer.boundary()

    def _hand_over(self) -> None:
        if outputs := self._core.take_outputs():
            self._num_generated_tokens += sum(len(output.token_ids) for output in outputs)
            self._observer.delivered(outputs)
            self._port.send(m.Outputs(outputs=tuple(outputs)))

    def _return_tickets(self) -> None:
        for call in [call for call, ticket in self._tickets.items() if ticket.done]:
            error = self._tickets.pop(call).error
            answer = self._answers.pop(call)
            self._return(call, None if error else answer, error)

    def _return(self, call: int, answer: Answer | None, error: EngineError | None) -> None:
        self._observer.returned(call, answer, error)
        if error is not None:
            self._port.send(m.Refusal.of(call, error))
        elif answer is not None:  # only that of a shutdown is none
            self._port.send(m.Answer(call=call, answer=answer))

    # ---- one method for each call: (call, buffers) -> answer ----

    def _submit(self, call: m.Submit, buffers: Buffers) -> Answer:
        state = self._core.submit(call.request_id, call.prompt_token_ids, call.params)
        self._num_prompt_tokens += len(call.prompt_token_ids)
        return {"state": state}

    def _abort(self, call: m.Abort, buffers: Buffers) -> Answer:
        return {"aborted": self._core.abort(call.request_ids)}

    def _pause(self, call: m.Pause, buffers: Buffers) -> None:
        mode: Any = call.mode  # the core says which there are
        self._await(call, self._core.begin_pause(mode, clear_cache=call.clear_cache), {"status": "paused"})

    def _resume(self, call: m.Resume, buffers: Buffers) -> Answer:
        self._core.resume()
        return {"status": "resumed"}

    def _is_paused(self, call: m.IsPaused, buffers: Buffers) -> Answer:
        return {"is_paused": self._core.is_paused()}

    def _sleep(self, call: m.Sleep, buffers: Buffers) -> None:
        level: Any = call.level
        mode: Any = call.mode
        self._await(call, self._core.begin_sleep(level, mode), {"status": "sleeping"})

    def _wake_up(self, call: m.WakeUp, buffers: Buffers) -> Answer:
        self._core.wake_up(call.tags)
        return {"status": "sleeping" if self._core.is_sleeping() else "awake"}

    def _is_sleeping(self, call: m.IsSleeping, buffers: Buffers) -> Answer:
        return {"is_sleeping": self._core.is_sleeping()}

    def _reset_prefix_cache(self, call: m.ResetPrefixCache, buffers: Buffers) -> Answer:
        self._core.reset_prefix_cache()
        return {"status": "reset"}

    def _start_weight_update(self, call: m.StartWeightUpdate, buffers: Buffers) -> Answer:
        self._core.start_weight_update(allow_unpaused=call.allow_unpaused)
        self._parts = _Parts()
        return {"status": "started"}

    def _update_weights(self, call: m.UpdateWeights, buffers: Buffers) -> Answer:
        if self._core.update_open:
            self._parts.check(call.part, call.of)
        self._core.update_weights(_tensors(call, buffers))
        self._parts.add(call.part, call.of)
        return {"status": "updated"}

    def _finish_weight_update(self, call: m.FinishWeightUpdate, buffers: Buffers) -> Answer:
        if self._core.update_open:
            self._parts.check_complete()
        self._core.finish_weight_update(call.version)
        return {"status": "finished", "weight_version": self._core.weight_version}

    def _load_weights(self, call: m.LoadWeights, buffers: Buffers) -> Answer:
        self._core.load_weights(_tensors(call, buffers), call.version)
        return {"status": "finished", "weight_version": self._core.weight_version}

    def _update_weight_version(self, call: m.UpdateWeightVersion, buffers: Buffers) -> Answer:
        self._core.update_weight_version(call.version, allow_unpaused=call.allow_unpaused)
        return {"weight_version": self._core.weight_version}

    def _get_weight_version(self, call: m.GetWeightVersion, buffers: Buffers) -> Answer:
        return {"weight_version": self._core.weight_version}

    def _weight_checksums(self, call: m.WeightChecksums, buffers: Buffers) -> Answer:
        return {"checksums": self._core.weight_checksums()}

    def _get_counters(self, call: m.GetCounters, buffers: Buffers) -> Answer:
        core, scheduler = self._core, self._core.scheduler
        return {
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "parked": sum(request.parked for request in scheduler.waiting),
            "blocked": len(scheduler.blocked),
            "free_blocks": scheduler.pool.num_free,
            "num_blocks": core.config.num_blocks,
            "prompt_tokens": self._num_prompt_tokens,
            "generated_tokens": self._num_generated_tokens,
            "prefix_cache_queries": scheduler.num_looked_up_tokens,
            "prefix_cache_hits": scheduler.num_hit_tokens,
            "preemptions": scheduler.num_preemptions,
            "pause_mode": core.pause_mode,
            "pause_pending": core.pause_pending,
            "sleeping": core.is_sleeping(),
            "update_open": core.update_open,
            "out_of_service": core.failed_update,
            "weight_version": core.weight_version,
        }

    def _stop_soon(self, call: m.Shutdown, buffers: Buffers) -> None:
        """The earliest of several deadlines counts."""
        stop_by = monotonic() + call.drain_s
        if self._shutdown is None or stop_by < self._stop_by:
            self._shutdown, self._stop_by = call, stop_by

    def _await(self, call: m.Call, ticket: PauseTicket, answer: Answer) -> None:
        self._tickets[call.call], self._answers[call.call] = ticket, answer

    _handlers: ClassVar[dict[type[m.Call], Callable[..., Answer | None]]] = {
        m.Submit: _submit,
        m.Abort: _abort,
        m.Pause: _pause,
        m.Resume: _resume,
        m.IsPaused: _is_paused,
        m.Sleep: _sleep,
        m.WakeUp: _wake_up,
        m.IsSleeping: _is_sleeping,
        m.ResetPrefixCache: _reset_prefix_cache,
        m.StartWeightUpdate: _start_weight_update,
        m.UpdateWeights: _update_weights,
        m.FinishWeightUpdate: _finish_weight_update,
        m.LoadWeights: _load_weights,
        m.UpdateWeightVersion: _update_weight_version,
        m.GetWeightVersion: _get_weight_version,
        m.WeightChecksums: _weight_checksums,
        m.GetCounters: _get_counters,
        m.Shutdown: _stop_soon,
    }


class _Parts:
    """Which parts of a weight session have come, if its caller counts them."""

    def __init__(self) -> None:
        self._of: int | None = None
        self._sent: set[int] = set()

    def check(self, part: int | None, of: int | None) -> None:
        """Raises: InvalidArgument, for a part that cannot be one of this session."""
        if part is None and of is None:
            return
        if part is None or of is None or not 1 <= part <= of:
            raise InvalidArgument(f"part {part} of {of}: expected numbers from 1 to how many there are, or neither")
        if self._of not in (None, of):
            raise InvalidArgument(f"part {part} of {of}: this session's earlier parts are of {self._of}")

    def add(self, part: int | None, of: int | None) -> None:
        if part is not None:
            self._of = of
            self._sent.add(part)

    def check_complete(self) -> None:
        """Raises: Conflict, if parts are missing."""
        if self._of is not None and len(self._sent) < self._of:
            raise Conflict(f"{len(self._sent)} of {self._of} parts were sent; send the others before finish")


def _tensors(call: m.UpdateWeights | m.LoadWeights, buffers: Buffers) -> NamedTensors:
    return unpack(call.tensors, buffers) if call.folder is None else read_safetensors(call.folder)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
