"""The model's face: operations and steps in, transactions of events out.

docs/semantics.md fixes the order of events; each method below is one of its rows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from harness.events import (
    Accepted,
    Asleep,
    Awake,
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
from harness.model.flight import Flight
from harness.model.pause import PauseCall, PauseState
from harness.model.profile import CAESURA, Profile
from harness.model.refusal import Refused
from harness.model.request import Request
from harness.model.scheduler import Scheduler
from harness.model.shape import Shape
from harness.model.sleep import DROPPED, SleepState
from harness.model.weights import Weights
from harness.operations import (
    DRIVER_VERBS,
    Abort,
    FinishWeightUpdate,
    IsPaused,
    IsSleeping,
    Mode,
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
from harness.state import EngineState

Answer = dict[str, Any]


class EngineModel:
    """One engine: what its loop does, and what it is asked to do.

    A turn of the loop is `schedule()` if `launch_due`, then `land(...)` if `landing_due`. Under
    synchronous scheduling both are due, and a turn is one whole step. Under asynchronous
    scheduling the first turn only launches, a later one launches a step and lands the one
    before it, the last only lands. A turn that has neither to do may still have to `look()`: under
    profiles by which a pause does not complete as soon as nothing is left to run. Operations may come at any time, between the halves too.
    Each method that changes something returns the events of that transaction, in order.
    """

    __slots__ = (
        "_depth",
        "_flights",
        "_max_model_len",
        "_must_land",
        "_pause",
        "_profile",
        "_requests",
        "_scheduler",
        "_shape",
        "_sleep",
        "_step",
        "_weights",
    )

    def __init__(self, shape: Shape, *, profile: Profile = CAESURA, eos_token_ids: tuple[int, ...] = ()) -> None:
        self._shape = shape
        self._profile = profile
        self._max_model_len = shape.max_model_len
        """Tokens, prompt and output together, at which a request ends."""
        if profile.fits_model_len_to_pool:
            self._max_model_len = min(shape.max_model_len, shape.num_blocks * shape.block_size)
        self._scheduler = Scheduler(shape, profile=profile, eos_token_ids=eos_token_ids)
        self._pause = PauseState(meet=profile.pauses_meet)
        self._weights = Weights(counts_parts=profile.weights_need_pause, failure_stops=profile.failed_update_stops)
        self._sleep = SleepState()
        self._requests: dict[str, Request] = {}
        """Live and blocked ones, in order of submission."""
        self._step = 0
        self._flights: deque[Flight] = deque()
        """Steps launched and not landed, oldest first."""
        self._depth = 2 if shape.async_scheduling else 1
        """How many of them there may be."""
        self._must_land = False
        """What can run waits for the step in flight: nothing was left to launch when a step was last composed."""

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
            pause_pending=self._pause.mode is not None and not self._pause.effective,
            weight_version=self._weights.version,
            update_open=self._weights.session is not None,
            out_of_service=self._out_of_service,
            asleep=self._sleep.tags,
            sleep_level=self._sleep.level,
            host=tuple(scheduler.host.copies),
        )

    def has_work(self) -> bool:
        """Whether a turn of the loop is due."""
        return self._busy or self.look_due

    @property
    def launch_due(self) -> bool:
        """Whether `schedule()` is allowed."""
        if self._must_land or len(self._flights) == self._depth:
            return False
        if not self._frozen and self._scheduler.has_runnable(admit=self._admits):
            return True
        return self._profile.empty_steps and self._scheduler.unreported

    @property
    def landing_due(self) -> bool:
        """Whether the oldest step in flight has to land now: nothing else can be launched before."""
        return bool(self._flights) and not self.launch_due

    @property
    def look_due(self) -> bool:
        """Whether pause calls are pending that complete when the loop looks for work: nothing is left to run or to land."""
        return bool(self._pause.calls) and not self._busy

    @property
    def landing_epoch(self) -> int:
        """The weights epoch that the step that lands next was launched on.

        Raises:
            IndexError: no step is in flight.
        """
        return self._flights[0].epoch

    # Steps.

    def schedule(self) -> list[Event]:
        """The first half of a step: choose the batch, take its blocks, launch the forward pass.

        With a step in flight it may turn out that everyone waits for that one's tokens: then nothing
        is launched (the events tell at most of preemptions), and a landing is due.

        Raises:
            RuntimeError: no launch is due.
        """
        if not self.launch_due:
            raise RuntimeError("schedule() while launch_due is false: a step is not allowed here, ask launch_due first")
        events: list[Event] = []
        draft = self._scheduler.compose(events, epoch=self._weights.epoch, admit=self._admits, frozen=self._frozen)
        if not draft.batch and not self._profile.empty_steps:
            assert self._flights, f"step {self._step + 1} is empty although a request can run"
            self._must_land = True
            return events
        self._step += 1
        self._flights.append(Flight(self._step, self._weights.epoch, self._weights.version, draft.samplers))
        events.append(Launched(step=self._step, batch=tuple(draft.batch)))
        return events

    def land(self, sample: Callable[[str, int], int]) -> list[Event]:
        """The second half, of the oldest step in flight: `sample(request_id, position)` gives each new token;
        the prompt's first position is 0.

        Raises:
            RuntimeError: no step is in flight.
        """
        if not self._flights:
            raise RuntimeError("land() without a step in flight: call schedule() first")
        self._must_land = False
        events: list[Event] = []
        flight = self._flights.popleft()
        if self._profile.labels_at_landing:
            flight = flight._replace(version=self._weights.version)
        ended = self._scheduler.record(events, sample, flight)
        for request in ended:
            del self._requests[request.id]
        self._run_dry(events)
        return events

    def look(self) -> list[Event]:
        """The loop looks for work and finds none: pause calls that are pending complete.

        Raises:
            RuntimeError: no look is due.
        """
        if not self.look_due:
            raise RuntimeError("look() while look_due is false: no pause call is pending, or there is work, ask look_due first")
        events: list[Event] = []
        self._complete_pause(events)
        return events

    # Operations.

    def apply(self, op: int, operation: Operation) -> list[Event]:
        """Carry out one operation; its transaction from `received` on.

        Raises:
            ValueError: a verb of the lockstep driver, or a prompt that was not tokenised.
        """
        events: list[Event] = [Received(op=op)]
        try:
            answer = self._carry_out(op, operation, events)
        except Refused as refused:
            events.append(Returned(op=op, answer=None, error=refused.failure))
        else:
            if answer is not None:
                events.append(Returned(op=op, answer=answer, error=None))
        self._run_dry(events, op)
        return events

    def _carry_out(self, op: int, operation: Operation, events: list[Event]) -> Answer | None:
        """The answer; None if the call returns later."""
        match operation:
            case Submit():
                return self._submit(operation, events)
            case Abort():
                return self._abort(operation, events)
            case Pause():
                self._refuse_wait(operation.mode)
                return self._take_up_pause(PauseCall(op, operation.mode, operation.clear_cache), events)
            case Resume():
                return self._resume(events)
            case IsPaused():
                return {"is_paused": self._pause.mode is not None}
            case ResetPrefixCache():
                return self._reset_prefix_cache(events)
            case Sleep():
                return self._take_up_sleep(op, operation, events)
            case WakeUp():
                return self._wake_up(operation, events)
            case IsSleeping():
                return {"is_sleeping": self._sleep.level is not None}
            case StartWeightUpdate():
                return self._start_weight_update(operation, events)
            case UpdateWeights():
                spoilt = _spoilt(operation.source)
                self._weights.receive(operation.part, operation.of, spoilt=spoilt, fails=operation.fails, events=events)
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
        policy = self._late_policy if self._late else "queue"
        if policy == "reject":
            state = "out of service" if self._out_of_service else "paused"
            raise Refused("rejected", f"{submit.id} came while the engine is {state}: try again later")
        self._requests[request.id] = request
        if policy == "block":
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

    def _refuse_wait(self, mode: Mode) -> None:
        """A `wait` where what it waits for cannot run."""
        if mode != "wait" or not self._live():
            return
        if self._out_of_service:
            raise Refused("out-of-service", f"{self._weights.failure}: nothing can run; abort, or finish a full update first")
        if self._weights.session is not None and self._profile.weights_need_pause:
            raise Refused("conflict", "a weight session is open: nothing can run to its end, finish the session first")
        if self._sleep.level is not None:
            raise Refused("conflict", "the engine sleeps: nothing can run to its end, wake it up first")

    def _take_up_pause(self, call: PauseCall, events: list[Event], *, joins: bool = False) -> None:
        """A call that `joins` wants the mode that is in force, and does nothing to requests."""
        for superseded in self._pause.take_up(call):
            events.append(_superseded(superseded, str(call)))
        apart = self._profile.pauses_meet == "apart"
        events.append(PausePending(mode=call.mode, clear_cache=call.clear_cache if apart else self._pause.clear_cache))
        if joins:
            return
        if call.mode == "abort":
            self._end_aborted(self._live(), events)
        elif call.mode == "wait":
            self._scheduler.unpark()

    def _take_up_sleep(self, op: int, sleep: Sleep, events: list[Event]) -> None:
        joins = sleep.mode is None and self._pause.mode is not None
        mode = sleep.mode or self._pause.mode or "abort"
        if not joins:
            self._refuse_wait(mode)
        if self._weights.session is not None:
            raise Refused("conflict", "a weight session is open: finish it before sleeping")
        self._take_up_pause(PauseCall(op, mode, sleep.level >= 1, sleep.level), events, joins=joins)

    def _wake_up(self, wake: WakeUp, events: list[Event]) -> Answer:
        level = self._sleep.level
        woken = self._sleep.wake(wake.tags)
        if woken is not None:
            events.append(Awake(tags=self._sleep.tags))
            if level == DROPPED and "weights" in woken:
                self._weights.drop()
            self._end_pause_of_sleep(events)
        return {"status": "awake" if self._sleep.level is None else "sleeping"}

    def _end_pause_of_sleep(self, events: list[Event]) -> None:
        """Once all is awake and `resume` would not be refused, a pause that nobody but `sleep` made is over."""
        forbidden = self._weights.session is not None or self._out_of_service
        if self._pause.effective and not self._pause.asked and self._sleep.level is None and not forbidden:
            self._resume(events)

    def _resume(self, events: list[Event]) -> Answer:
        if self._weights.session is not None and self._profile.weights_need_pause:
            raise Refused("conflict", "a weight session is open: call finish_weight_update before resume")
        if self._sleep.level is not None:
            raise Refused("conflict", "the engine sleeps: call wake_up before resume")
        if self._out_of_service:
            raise Refused("out-of-service", f"{self._weights.failure}: finish a full update before resume")
        if self._pause.calls and self._profile.ranks_agree:
            raise Refused("conflict", "a pause is pending until all ranks have it: resume once it has returned")
        if self._pause.mode is not None:
            for call in self._pause.end():
                events.append(_superseded(call, "resume"))
            events.append(Resumed())
            self._let_in_late_requests(events)
        return {"status": "resumed"}

    def _reset_prefix_cache(self, events: list[Event]) -> Answer:
        if self._scheduler.pool.nothing_held or (self._pause.effective and self._profile.reset_preempts_frozen):
            self._scheduler.clear_cache(events)
            return {"status": "reset"}
        events.append(Cleared(tier="device", success=False, empty=False))
        raise Refused("busy", "requests hold blocks: pause first, or wait until they have ended")

    def _start_weight_update(self, start: StartWeightUpdate, events: list[Event]) -> Answer:
        self._expect_pause("start_weight_update", allow_unpaused=start.allow_unpaused)
        if self._pause.calls and self._profile.weights_need_pause:
            raise Refused("conflict", "a pause is pending: start_weight_update once it has returned")
        if "weights" in self._sleep.tags:
            raise Refused("conflict", "the weights sleep: wake them up before start_weight_update")
        self._weights.start(fails=start.fails, events=events)
        return {"status": "started"}

    def _finish_weight_update(self, finish: FinishWeightUpdate, events: list[Event]) -> Answer:
        was_out_of_service = self._out_of_service
        self._weights.finish(finish.version, fails=finish.fails, events=events)
        if was_out_of_service and self._pause.mode is None:
            self._let_in_late_requests(events)
        self._end_pause_of_sleep(events)
        return {"status": "finished", "weight_version": self._weights.version}

    def _swap_weights(self, swap: SwapWeights, events: list[Event]) -> Answer:
        self._start_weight_update(StartWeightUpdate(), events)
        try:
            self._weights.receive(1, 1, spoilt=_spoilt(swap.source), fails=swap.fails, events=events)
        except Refused:
            self._weights.abandon()
            raise
        return self._finish_weight_update(FinishWeightUpdate(version=swap.version), events)

    def _update_weight_version(self, update: UpdateWeightVersion, events: list[Event]) -> Answer:
        self._expect_pause("update_weight_version", allow_unpaused=update.allow_unpaused)
        self._weights.version = update.version
        events.append(Relabelled(version=update.version))
        return {"weight_version": update.version}

    # Pauses.

    def _run_dry(self, events: list[Event], op: int | None = None) -> None:
        """After a step, or in operation `op`: if nothing is left to run or to land, pending pauses complete."""
        if self.look_due and not self._profile.ranks_agree:
            self._complete_pause(events, op)

    def _complete_pause(self, events: list[Event], op: int | None = None) -> None:
        """A pending pause becomes effective, and its calls return."""
        takes_effect = None if self._pause.effective else self._pause.mode
        for clear_cache, calls in self._pause.complete(op):
            if clear_cache:
                self._scheduler.clear_cache(events)
            if takes_effect is not None:
                events.append(PauseEffective(mode=takes_effect, clear_cache=clear_cache))
                takes_effect = None
            for call in calls:
                if call.level is None:
                    events.append(Returned(op=call.op, answer={"status": "paused"}, error=None))
            self._fall_asleep([call for call in calls if call.level is not None], events)

    def _fall_asleep(self, calls: Sequence[PauseCall], events: list[Event]) -> None:
        """The pause of these sleep calls is effective."""
        if not calls:
            return
        level = self._sleep.fall(max(call.level or 0 for call in calls))
        events.append(Asleep(level=level, tags=self._sleep.tags))
        for call in calls:
            events.append(Returned(op=call.op, answer={"status": "sleeping"}, error=None))

    def _let_in_late_requests(self, events: list[Event]) -> None:
        """Scheduling goes on: nobody is parked any more, and blocked ones are accepted, in order."""
        self._scheduler.unpark()
        for request in self._blocked():
            request.status = "waiting"
            self._scheduler.enqueue(request)
            events.append(Accepted(request=request.id, parked=False))

    @property
    def _busy(self) -> bool:
        """Whether a step is in flight or due."""
        return bool(self._flights) or self.launch_due

    @property
    def _frozen(self) -> bool:
        """Whether nothing may be scheduled."""
        mode = self._pause.mode
        return self._out_of_service or (mode is not None and (mode != "wait" or self._pause.effective))

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
        longest = self._max_model_len - 1
        if not 1 <= len(prompt) <= longest:
            raise Refused("invalid", f"got a prompt of {len(prompt)} tokens, expected 1 to max_model_len - 1 = {longest}")
        if submit.max_tokens < 1:
            raise Refused("invalid", f"got max_tokens {submit.max_tokens}, expected at least 1")
        if (flaw := _sampling_flaw(submit)) is not None:
            raise Refused("invalid", flaw)
        if submit.id in self._requests:
            raise Refused("invalid", f"the id {submit.id} is that of a request that has not ended: use another, or abort it")
        request = Request(submit, prompt, max_model_len=self._max_model_len)
        blocks = -(-request.length_limit // self._shape.block_size)
        if blocks > self._shape.num_blocks:
            raise Refused("invalid", f"{submit.id} may need {blocks} blocks, the pool has {self._shape.num_blocks}: lower max_tokens")
        return request

    def _end_aborted(self, requests: Iterable[Request], events: list[Event]) -> None:
        """End these requests; tokens that have landed were delivered then, so that their outputs are empty."""
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

    @property
    def _late_policy(self) -> Literal["queue", "reject", "block"]:
        """What becomes of a late request."""
        if self._profile.late_requests == "reject-unless-keep":
            return "queue" if self._pause.mode == "keep" else "reject"
        return self._profile.late_requests or self._shape.late_requests

    def _expect_pause(self, verb: str, *, allow_unpaused: bool) -> None:
        if not (self._pause.effective or allow_unpaused or not self._profile.weights_need_pause):
            raise Refused("conflict", f"{verb} needs an effective pause: pause first and wait for its answer, or say allow_unpaused")


def _sampling_flaw(submit: Submit) -> str | None:
    """What is wrong with how a request wants its tokens chosen."""
    if submit.temperature < 0:
        return f"got temperature {submit.temperature}, expected at least 0"
    if not 0 < submit.top_p <= 1:
        return f"got top_p {submit.top_p}, expected more than 0 and at most 1"
    if not 0 <= submit.min_p <= 1:
        return f"got min_p {submit.min_p}, expected 0 to 1"
    if submit.top_k < 0 or (submit.logprobs or 0) < 0:
        return f"got top_k {submit.top_k} and logprobs {submit.logprobs}, expected at least 0"
    return None


def _spoilt(source: WeightSource) -> int | None:
    """Which tensor of a part is bad, if one is."""
    return None if source.spoil is None else source.spoil.tensor


def _superseded(call: PauseCall, by: str) -> Returned:
    return Returned(op=call.op, answer=None, error=Failure("superseded", f"{by} came before this {call} was effective"))
