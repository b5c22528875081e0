"""The model's face: operations and steps in, transactions of events out.

docs/semantics.md fixes the order of events; each method below is one of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from harness.events import (
    Accepted,
    Blocked,
    Cleared,
    Delivered,
    Event,
    Failure,
    Launched,
    Output,
    PauseEffective,
    PausePending,
    Received,
    Relabelled,
    Resumed,
    Returned,
)
from harness.model.pause import PauseCall, PauseState
from harness.model.profile import CAESURA, Profile
from harness.model.refusal import Refused
from harness.model.request import Request
from harness.model.scheduler import Scheduler
from harness.model.shape import Shape
from harness.model.weights import Weights
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
)
from harness.state import EngineState

Answer = dict[str, Any]


class EngineModel:
    """One engine under synchronous scheduling.

    A step is `schedule()`, then `land(...)`; operations come between steps. Each method
    that changes something returns the events of that transaction, in order.
    """

    __slots__ = ("_in_flight", "_pause", "_profile", "_requests", "_scheduler", "_shape", "_step", "_weights")

    def __init__(self, shape: Shape, *, profile: Profile = CAESURA, eos_token_ids: tuple[int, ...] = ()) -> None:
        self._shape = shape
        self._profile = profile
        self._scheduler = Scheduler(shape, profile=profile, eos_token_ids=eos_token_ids)
        self._pause = PauseState()
        self._weights = Weights()
        self._requests: dict[str, Request] = {}
        """Live and blocked ones, in order of submission."""
        self._step = 0
        self._in_flight = False

    # Questions.

    @property
    def epoch(self) -> int:
        """How many weight sessions have written at least one byte."""
        return self._weights.epoch

    def kv_epochs(self, request_id: str) -> tuple[int, ...]:
        """For each computed token of a live request, the epoch of the step that wrote its KV entry.

        Raises:
            KeyError: the request is neither live nor blocked.
        """
        request = self._requests[request_id]
        entries = [epoch for block in request.blocks for epoch in self.block_epochs(block)]
        return tuple(entries[: request.computed])

    def token_versions(self, request_id: str) -> tuple[str, ...]:
        """For each output token of a live request, the label of the weights that sampled it.

        Raises:
            KeyError: the request is neither live nor blocked.
        """
        return tuple(span.version for span in self._requests[request_id].spans() for _ in range(span.start, span.end))

    def block_epochs(self, block: int) -> tuple[int, ...]:
        """The epoch of each entry that was written into a block since it was last taken from the free queue."""
        return tuple(self._scheduler.pool.epochs[block])

    def state(self) -> EngineState:
        """The whole visible state, as canonical values."""
        scheduler = self._scheduler
        pool = scheduler.pool
        return EngineState(
            running=tuple(request.state() for request in scheduler.running),
            waiting=tuple(request.state() for request in scheduler.waiting),
            blocked=tuple(request.id for request in self._blocked()),
            references=tuple(pool.references),
            digests=pool.digests(),
            free=tuple(pool.free),
            pause_mode=self._pause.mode,
            pause_pending=bool(self._pause.calls),
            weight_version=self._weights.version,
            update_open=self._weights.session is not None,
            out_of_service=self._out_of_service,
        )

    def has_work(self) -> bool:
        """Whether a step is due."""
        if not self._frozen and self._scheduler.has_runnable(admit=self._admits):
            return True
        return self._profile.empty_steps and self._scheduler.unreported

    # Steps.

    def schedule(self) -> list[Event]:
        """The first half of a step: choose the batch, take its blocks, launch the forward pass.

        Raises:
            RuntimeError: a step is in flight, or none is due.
        """
        self._expect_between_steps("schedule")
        if not self.has_work():
            raise RuntimeError("schedule() while has_work() is false: a step is not allowed here, ask has_work() first")
        self._step += 1
        self._in_flight = True
        events: list[Event] = []
        batch = self._scheduler.compose(events, epoch=self._weights.epoch, admit=self._admits, frozen=self._frozen)
        assert batch or self._profile.empty_steps, f"step {self._step} is empty although a request can run"
        events.append(Launched(step=self._step, batch=batch))
        return events

    def land(self, sample: Callable[[str, int], int]) -> list[Event]:
        """The second half: `sample(request_id, position)` gives each new token; the prompt's first position is 0.

        Raises:
            RuntimeError: no step is in flight.
        """
        if not self._in_flight:
            raise RuntimeError("land() without a step in flight: call schedule() first")
        self._in_flight = False
        events: list[Event] = []
        ended = self._scheduler.record(events, sample, step=self._step, version=self._weights.version)
        for request in ended:
            del self._requests[request.id]
        self._complete_pause(events)
        return events

    # Operations.

    def apply(self, op: int, operation: Operation) -> list[Event]:
        """Carry out one operation; its transaction from `received` on.

        Raises:
            ValueError: a verb of the lockstep driver, or a prompt that was not tokenised.
            RuntimeError: a step is in flight.
        """
        self._expect_between_steps(operation.verb)
        events: list[Event] = [Received(op=op)]
        try:
            answer = self._carry_out(op, operation, events)
        except Refused as refused:
            events.append(Returned(op=op, answer=None, error=refused.failure))
        else:
            if answer is not None:
                events.append(Returned(op=op, answer=answer, error=None))
        self._complete_pause(events)
        return events

    def _carry_out(self, op: int, operation: Operation, events: list[Event]) -> Answer | None:
        """The answer; None if the call returns later."""
        match operation:
            case Submit():
                return self._submit(operation, events)
            case Abort():
                return self._abort(operation, events)
            case Pause():
                return self._take_up_pause(op, operation, events)
            case Resume():
                return self._resume(events)
            case IsPaused():
                return {"is_paused": self._pause.mode is not None}
            case ResetPrefixCache():
                return self._reset_prefix_cache(events)
            case StartWeightUpdate():
                return self._start_weight_update(operation, events)
            case UpdateWeights():
                self._weights.receive(operation.part, operation.of, fails=operation.fails, events=events)
                return {"status": "updated"}
            case FinishWeightUpdate():
                return self._finish_weight_update(operation, events)
            case SwapWeights():
                return self._swap_weights(operation, events)
            case UpdateWeightVersion():
                return self._update_weight_version(operation, events)
        driver = ", ".join(verb.verb for verb in DRIVER_VERBS)
        raise ValueError(f"got `{operation.verb}`, expected an operation of an engine: {driver} are carried out by the lockstep driver")

    def _submit(self, submit: Submit, events: list[Event]) -> Answer:
        request = self._valid_request(submit)
        if self._late and self._shape.late_requests == "reject":
            state = "out of service" if self._out_of_service else "paused"
            raise Refused("rejected", f"{submit.id} came while the engine is {state}: try again later")
        self._requests[request.id] = request
        if self._late and self._shape.late_requests == "block":
            request.status = "blocked"
            events.append(Blocked(request=request.id))
            return {"state": "blocked"}
        request.parked = self._late
        self._scheduler.enqueue(request)
        events.append(Accepted(request=request.id, parked=request.parked))
        return {"state": "parked" if request.parked else "queued"}

    def _abort(self, abort: Abort, events: list[Event]) -> Answer:
        ids = tuple(self._requests) if abort.ids == "all" else dict.fromkeys(abort.ids)
        requests = [self._requests[request_id] for request_id in ids if request_id in self._requests]
        self._end_aborted(requests, events)
        return {"aborted": len(requests)}

    def _take_up_pause(self, op: int, pause: Pause, events: list[Event]) -> None:
        if pause.mode == "wait" and self._live():
            if self._out_of_service:
                raise Refused("out-of-service", f"{self._weights.failure}: nothing can run; abort, or finish a full update first")
            if self._weights.session is not None:
                raise Refused("conflict", "a weight session is open: nothing can run to its end, finish the session first")
        for call in self._pause.take_up(PauseCall(op, pause.mode, pause.clear_cache)):
            events.append(_superseded(call, "pause(keep)"))
        events.append(PausePending(mode=pause.mode, clear_cache=self._pause.clear_cache))
        if pause.mode == "abort":
            self._end_aborted(self._live(), events)
        elif pause.mode == "wait":
            self._scheduler.unpark()

    def _resume(self, events: list[Event]) -> Answer:
        if self._weights.session is not None:
            raise Refused("conflict", "a weight session is open: call finish_weight_update before resume")
        if self._out_of_service:
            raise Refused("out-of-service", f"{self._weights.failure}: finish a full update before resume")
        if self._pause.mode is not None:
            for call in self._pause.end():
                events.append(_superseded(call, "resume"))
            events.append(Resumed())
            self._let_in_late_requests(events)
        return {"status": "resumed"}

    def _reset_prefix_cache(self, events: list[Event]) -> Answer:
        if self._pause.effective or self._scheduler.pool.nothing_held:
            self._scheduler.clear_cache(events)
            return {"status": "reset"}
        events.append(Cleared(tier="device", success=False, empty=False))
        raise Refused("busy", "requests hold blocks: pause first, or wait until they have ended")

    def _start_weight_update(self, start: StartWeightUpdate, events: list[Event]) -> Answer:
        self._expect_pause("start_weight_update", allow_unpaused=start.allow_unpaused)
        if self._pause.calls:
            raise Refused("conflict", "a pause is pending: start_weight_update once it has returned")
        self._weights.start(fails=start.fails, events=events)
        return {"status": "started"}

    def _finish_weight_update(self, finish: FinishWeightUpdate, events: list[Event]) -> Answer:
        was_out_of_service = self._out_of_service
        self._weights.finish(finish.version, fails=finish.fails, events=events)
        if was_out_of_service and self._pause.mode is None:
            self._let_in_late_requests(events)
        return {"status": "finished", "weight_version": self._weights.version}

    def _swap_weights(self, swap: SwapWeights, events: list[Event]) -> Answer:
        self._start_weight_update(StartWeightUpdate(), events)
        self._weights.receive(1, 1, fails=swap.fails, events=events)
        return self._finish_weight_update(FinishWeightUpdate(version=swap.version), events)

    def _update_weight_version(self, update: UpdateWeightVersion, events: list[Event]) -> Answer:
        self._expect_pause("update_weight_version", allow_unpaused=update.allow_unpaused)
        self._weights.version = update.version
        events.append(Relabelled(version=update.version))
        return {"weight_version": update.version}

    # Pauses.

    def _complete_pause(self, events: list[Event]) -> None:
        """A pending pause becomes effective, and its calls return, once nothing is left to run."""
        if not self._pause.calls or self.has_work():
            return
        clear_cache = self._pause.clear_cache
        if clear_cache:
            self._scheduler.clear_cache(events)
        assert self._pause.mode is not None
        events.append(PauseEffective(mode=self._pause.mode, clear_cache=clear_cache))
        for call in self._pause.complete():
            events.append(Returned(op=call.op, answer={"status": "paused"}, error=None))

    def _let_in_late_requests(self, events: list[Event]) -> None:
        """Scheduling goes on: nobody is parked any more, and blocked ones are accepted, in order."""
        self._scheduler.unpark()
        for request in self._blocked():
            request.status = "waiting"
            self._scheduler.enqueue(request)
            events.append(Accepted(request=request.id, parked=False))

    @property
    def _frozen(self) -> bool:
        """Whether nothing may be scheduled."""
        mode = self._pause.mode
        return self._out_of_service or (mode is not None and (mode != "wait" or not self._pause.calls))

    @property
    def _admits(self) -> bool:
        """Whether waiting requests that are not parked may be admitted, if anything may be scheduled."""
        return self._pause.mode is None or self._profile.wait_admits_waiting

    # Requests.

    def _valid_request(self, submit: Submit) -> Request:
        """Rules R27 to R29 as semantics.md has them."""
        prompt = submit.prompt.token_ids
        if prompt is None:
            raise ValueError(f"{submit.id} has a prompt of text: the model needs token ids, tokenise it first")
        longest = self._shape.max_model_len - 1
        if not 1 <= len(prompt) <= longest:
            raise Refused("invalid", f"got a prompt of {len(prompt)} tokens, expected 1 to max_model_len - 1 = {longest}")
        if submit.max_tokens < 1:
            raise Refused("invalid", f"got max_tokens {submit.max_tokens}, expected at least 1")
        if submit.id in self._requests:
            raise Refused("invalid", f"the id {submit.id} is that of a request that has not ended: use another, or abort it")
        request = Request(submit, prompt, max_model_len=self._shape.max_model_len)
        blocks = -(-request.length_limit // self._shape.block_size)
        if blocks > self._shape.num_blocks:
            raise Refused("invalid", f"{submit.id} may need {blocks} blocks, the pool has {self._shape.num_blocks}: lower max_tokens")
        return request

    def _end_aborted(self, requests: Iterable[Request], events: list[Event]) -> None:
        """End these requests; their tokens were delivered before, so that their outputs are empty."""
        outputs = []
        for request in requests:
            self._scheduler.finish(request, "abort", events)
            del self._requests[request.id]
            outputs.append(Output(request.id, request.num_output_tokens, (), "abort"))
        if outputs:
            events.append(Delivered(outputs=tuple(outputs)))

    def _live(self) -> list[Request]:
        return [request for request in self._requests.values() if request.status != "blocked"]

    def _blocked(self) -> list[Request]:
        return [request for request in self._requests.values() if request.status == "blocked"]

    # Conditions.

    @property
    def _out_of_service(self) -> bool:
        return self._weights.failure is not None

    @property
    def _late(self) -> bool:
        """Whether a request handed in now is late."""
        return self._pause.mode is not None or self._out_of_service

    def _expect_between_steps(self, call: str) -> None:
        if self._in_flight:
            raise RuntimeError(f"{call} while step {self._step} is in flight: call land() first, operations come between steps")

    def _expect_pause(self, verb: str, *, allow_unpaused: bool) -> None:
        if not (self._pause.effective or allow_unpaused):
            raise Refused("conflict", f"{verb} needs an effective pause: pause first and wait for its answer, or say allow_unpaused")


def _superseded(call: PauseCall, by: str) -> Returned:
    return Returned(op=call.op, answer=None, error=Failure("superseded", f"{by} came before this pause({call.mode}) was effective"))
