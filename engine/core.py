"""The engine as a state machine: requests, steps, pauses, weights and versions.

Single-threaded: nothing happens between two calls. Whoever drives it repeats: take up
operations, `step` while `has_work`, hand over `take_outputs`, then `pause_complete`.
With `async_scheduling` one step is in flight on the device between two calls: a `step`
launches the next one, then lands it; a driver that takes operations up in between calls
`launch` and `land` itself. Transitions are reported to the observer in the order that
docs/semantics.md fixes.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, NoReturn, get_args

import torch

from .config import EngineConfig, SamplingParams
from .errors import CacheBusy, Conflict, ForwardFailed, InvalidArgument, OutOfService, RequestRejected, UpdateFailed
from .model_runner import Flight, ModelRunner
from .observer import Observer
from .outputs import EngineCoreOutput, FinishReason, PauseMode, PauseTicket, SleepLevel, Tag
from .request import Request, RequestStatus
from .sampler import SampledToken
from .scheduler import ScheduledTokens, Scheduler
from .weights import NamedTensors, WeightSession, WeightTarget, checksum, named_weights, tensors_of

DEFAULT_VERSION = "default"
"""The version label before any update."""


class Launched(NamedTuple):
    """A step in flight."""

    step: int
    sampling: list[ScheduledTokens]
    """The shares that sample."""
    version: str
    """Label of the weights that it was launched on."""
    flight: Flight


class EngineCore:
    """One engine on one device.

    Args:
        config: the engine's shape and checkpoint.
        observer: told of every transition.

    Raises:
        ValueError: the checkpoint is missing, or is not a decoder-only causal language model.

    Attributes:
        scheduler: queues and, as `scheduler.pool`, the block pool; for reading only.
        weight_target: where weight updates are written; may be replaced by a subclass of `WeightTarget`.
    """

    def __init__(self, config: EngineConfig, *, observer: Observer | None = None) -> None:
        self.config = config
        self._observer = Observer() if observer is None else observer
        self.runner = ModelRunner(config)
        self.scheduler = Scheduler(config, eos_token_ids=self.runner.eos_token_ids, observer=self._observer)
        self.weight_target = WeightTarget(self.runner.model)
        self._outputs: list[EngineCoreOutput] = []
        self._num_steps = 0
        self._flights: deque[Launched] = deque()
        self._most_flights = 2 if config.async_scheduling else 1
        self._came_to_nothing = False  # the next step cannot be scheduled before a landing
        self._forward_failure: str | None = None
        self._pause_mode: PauseMode | None = None
        self._pause_asked = False  # by a pause call, not only by sleep
        self._tickets: list[PauseTicket] = []  # pause and sleep calls taken up and not yet done, in order
        self._sleep_level: int | None = None
        self._session: WeightSession | None = None
        self._failed_update: str | None = None  # why the engine is out of service
        self._weight_version = DEFAULT_VERSION

    # ---- what can be seen ----

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.scheduler.eos_token_ids

    @property
    def pause_mode(self) -> PauseMode | None:
        """None while running; otherwise what all pause calls so far amount to, pending or effective."""
        return self._pause_mode

    @property
    def pause_pending(self) -> bool:
        """A pause was taken up and has not yet taken effect."""
        return bool(self._tickets)

    def is_paused(self) -> bool:
        """True from the moment that a pause is taken up: no proof that the engine is quiet, which `pause_complete` gives."""
        return self._pause_mode is not None

    def is_sleeping(self) -> bool:
        """True while anything is asleep, and after a sleep of level 0."""
        return self._sleep_level is not None

    @property
    def sleep_level(self) -> int | None:
        """None while awake."""
        return self._sleep_level

    @property
    def asleep(self) -> tuple[Tag, ...]:
        """Whose memory is given back, sorted."""
        return tuple(tag for tag, memory in sorted(self.runner.memory.items()) if not memory.is_mapped)

    @property
    def is_out_of_service(self) -> bool:
        """A weight update failed after its first byte, or sleep dropped the weights, and no full update has succeeded since."""
        return self._failed_update is not None

    @property
    def failed_update(self) -> str | None:
        """Why the engine is out of service; None: it is in service."""
        return self._failed_update

    @property
    def update_open(self) -> bool:
        """A weight session is open."""
        return self._session is not None

    @property
    def weight_version(self) -> str:
        """Label of the resident weights."""
        return self._weight_version

    # ---- requests ----

    def submit(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> Literal["queued", "parked", "blocked"]:
        """Hand in a request. Paused or out of service it is late, and `late_requests` says what becomes of it.

        Raises:
            InvalidArgument: a request that could never run here, or an id in use.
            RequestRejected: late, under the policy `reject`.
        """
        self._check_request(request_id, prompt_token_ids, params)
        request = Request(request_id, prompt_token_ids, params, self.config.block_size)
        late = self.is_paused() or self.is_out_of_service
        if late and self.config.late_requests == "reject":
            state = "out of service" if self.is_out_of_service else "paused"
            raise RequestRejected(f"request {request_id!r} came while the engine is {state}; try again later")
        if late and self.config.late_requests == "block":
            self.scheduler.block(request)
            return "blocked"
        self.scheduler.add(request, parked=late)
        return "parked" if late else "queued"

    def abort(self, request_ids: Iterable[str] | None) -> int:
        """End requests in the order given, or all (None) in the order of submission; works in every state.

        Returns:
            How many ended now. Unknown and finished ids are ignored.
        """
        requests = self.scheduler.requests
        doomed = list(requests) if request_ids is None else [rid for rid in dict.fromkeys(request_ids) if rid in requests]
        for request_id in doomed:
            self._abort(requests[request_id])
        return len(doomed)

    def take_outputs(self) -> list[EngineCoreOutput]:
        """Everything produced since the last call, in order. A pause takes effect only when outputs have been taken."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # ---- steps ----

    def has_work(self) -> bool:
        """Whether `step` would launch a forward pass, or land one."""
        return bool(self._flights) or self._may_launch

    def step(self) -> None:
        """One turn of the engine's loop: launch the next forward pass, land the oldest, or both; without work, do nothing.

        Raises:
            NotFinite: logits hold NaN or infinity; nothing was sampled, and no step may follow.
            ForwardFailed: an earlier forward pass raised. What it raised came through `step` unchanged.
        """
        if self.launch_due:
            self.launch()
        if self.landing_due:
            self.land()

    @property
    def launch_due(self) -> bool:
        """Whether the next step is to be scheduled now."""
        return self._may_launch and not self._came_to_nothing and len(self._flights) < self._most_flights

    @property
    def landing_due(self) -> bool:
        """Whether the oldest step in flight is to land now: no other can be launched before."""
        return bool(self._flights) and not self.launch_due

    def launch(self) -> None:
        """Schedule the next step and launch it; nothing is launched if all wait for tokens in flight. Requires `launch_due`.

        Raises:
            ForwardFailed: as for `step`; what a forward pass raises comes through.
        """
        assert self.launch_due, (self._pause_mode, self._flights)
        self._check_forward()
        batch = self.scheduler.schedule()
        if not batch:
            # Submit refuses what the pool cannot hold, so the first running or waiting request always fits by itself.
            assert self._flights, "nothing is in flight, and nothing can be scheduled"
            self._came_to_nothing = True
            return
        self._num_steps += 1
        self._observer.launched(self._num_steps, tuple((share.request.request_id, share.first, share.num_tokens) for share in batch))
        try:
            flight = self.runner.launch(batch, self.scheduler.take_copies())
        except BaseException as error:
            self._forward_failed(self._num_steps, error)
            raise
        sampling = [share for share in batch if share.samples]
        self._flights.append(Launched(self._num_steps, sampling, self._weight_version, flight))

    def land(self) -> None:
        """Wait for the oldest step in flight, and record and hand out what it sampled. Requires a step in flight.

        Raises:
            NotFinite, ForwardFailed: as for `step`.
        """
        self._check_forward()
        step, sampling, version, flight = self._flights.popleft()
        self._came_to_nothing = False
        try:
            tokens = list(zip(sampling, flight.wait(), strict=True))
        except BaseException as error:
            self._forward_failed(step, error)
            raise
        live = [(share, token) for share, token in tokens if share.request.finish_reason is None]
        self._observer.landed(step, tuple((share.request.request_id, token.token_id) for share, token in live))
        for share, _ in tokens:
            if (ended := share.request.finish_reason) is not None:
                self._observer.dropped(step, share.request.request_id, why="aborted" if ended == "abort" else "finished")
        for share, token in live:
            reason = self.scheduler.land(share, token.token_id, version=version)
            self._emit(share.request, (token,), reason)

    # ---- pause ----

    def begin_pause(self, mode: PauseMode = "abort", *, clear_cache: bool = True) -> PauseTicket:
        """Take up a pause; it takes effect in a later `pause_complete`, once the engine is quiet.

        Args:
            mode: `abort` ends every live request now, `wait` runs those accepted so far to their end, `keep` freezes them.
            clear_cache: forget all KV when the pause takes effect; frozen requests are prefilled again after resume.

        Returns:
            The call's ticket. Meeting pauses join or supersede each other as docs/semantics.md says; a ticket
            that is superseded is so before the observer hears of what superseded it.

        Raises:
            InvalidArgument: unknown mode.
            OutOfService, Conflict: `wait` for live requests, with weights that nothing may be sampled from, or asleep.
        """
        self._check_pause(mode)
        self._pause_asked = True
        return self._take_up(PauseTicket(mode, clear_cache), call="pause")

    def pause_complete(self) -> bool:
        """Let a pending pause take effect if nothing is left to run and all outputs have been taken.

        Returns:
            Whether no pause is pending now.
        """
        if not self._tickets:
            return True
        if self._outputs or self.has_work():
            return False
        self.runner.synchronize()
        assert self._pause_mode is not None
        clear = self._clear_asked
        if clear:
            self._clear_cache()
        done, self._tickets = self._tickets, []
        for ticket in done:
            ticket.take_effect()
        self._observer.pause_effective(self._pause_mode, clear_cache=clear)
        levels = [ticket.sleep_level for ticket in done if ticket.sleep_level is not None]
        if levels:
            self._fall_asleep(max(levels))
        return True

    def pause(
        self, mode: PauseMode = "abort", *, clear_cache: bool = True, wait_for_inflight_requests: bool | None = None
    ) -> list[EngineCoreOutput]:
        """Pause at once, for a caller who drives the engine itself.

        Args:
            mode, clear_cache: as for `begin_pause`.
            wait_for_inflight_requests: deprecated; True means `mode="wait"`.

        Returns:
            The outputs not taken yet: they are handed over here, before the pause takes effect.

        Raises:
            InvalidArgument: unknown mode, or `wait`: while this call waits, nobody would call `step`.
        """
        if wait_for_inflight_requests is not None:
            warnings.warn('wait_for_inflight_requests is deprecated; use mode="wait"', DeprecationWarning, stacklevel=2)
            mode = "wait" if wait_for_inflight_requests else mode
        if mode == "wait":
            raise InvalidArgument(
                "pause('wait') would wait for steps that nobody makes meanwhile; use begin_pause, step and pause_complete"
            )
        self.begin_pause(mode, clear_cache=clear_cache)
        while self.has_work():
            self.step()
        outputs = self.take_outputs()
        completed = self.pause_complete()
        assert completed
        return outputs

    def resume(self) -> None:
        """End the pause, superseding it if it is pending; while running, do nothing.

        Raises:
            Conflict: a weight session is open, or something is asleep.
            OutOfService: an update failed half-way, or sleep dropped the weights.
        """
        if self.update_open:
            raise Conflict("resume while a weight session is open; finish the update first")
        if self.is_sleeping():
            raise Conflict(f"resume while asleep (level {self._sleep_level}); wake up first")
        if self._failed_update is not None:
            raise OutOfService(f"resume refused: the weights cannot be sampled from ({self._failed_update}); send a full update first")
        if self._pause_mode is not None:
            self._end_pause(by="resume")

    def reset_prefix_cache(self) -> None:
        """Forget all KV that no request needs; while a pause is effective, frozen requests give theirs up too.

        Raises:
            CacheBusy: requests hold blocks and no pause is effective.
        """
        if self.is_paused() and not self.pause_pending:
            self._clear_cache()
            return
        if not self._clear_tiers():
            held = self.config.num_blocks - self.scheduler.pool.num_free
            raise CacheBusy(f"{held} of {self.config.num_blocks} blocks are held by requests; pause first, or reset when nothing runs")

    # ---- sleep ----

    def begin_sleep(self, level: SleepLevel = 1, mode: PauseMode | None = None) -> PauseTicket:
        """Take up a sleep: a pause that gives memory back when it takes effect, in a later `pause_complete`.

        Args:
            level: 0 gives no memory back, 1 moves the weights to the host and drops the KV, 2 drops both.
            mode: as for `begin_pause`. None: a pause in force or pending keeps its mode, and a running engine aborts.

        Returns:
            The call's ticket, as for `begin_pause`.

        Raises:
            InvalidArgument: unknown level or mode.
            Conflict: a weight session is open.
            OutOfService, Conflict: as for `begin_pause`.
        """
        if level not in get_args(SleepLevel):
            raise InvalidArgument(f"sleep level must be one of {', '.join(map(str, get_args(SleepLevel)))}, got {level!r}")
        if mode is not None:
            self._check_pause(mode)
        if self.update_open:
            raise Conflict("sleep while a weight session is open; finish the update first")
        if mode is not None or self._pause_mode is None:
            return self._take_up(PauseTicket(mode or "abort", level >= 1, level), call="sleep")
        ticket = PauseTicket(self._pause_mode, level >= 1, level)
        self._tickets.append(ticket)
        self._observer.pause_pending(self._pause_mode, clear_cache=self._clear_asked)
        return ticket

    def wake_up(self, tags: Iterable[str] | None = None) -> None:
        """Map memory again. When nothing is asleep any more, a pause that no pause call asked for ends, or will end when
        a weight session that stands against it is committed.

        Args:
            tags: whose memory, None for all; what is unknown or awake is ignored, and without any of it nothing happens.
        """
        wanted = None if tags is None else set(tags)
        woken = [tag for tag in self.asleep if wanted is None or tag in wanted]
        if self._sleep_level is None or (wanted is not None and not woken):
            return
        for tag, memory in self.runner.memory.items():
            if tag in woken:
                memory.map_again()
        if "weights" in woken and self._sleep_level == 2:
            self._failed_update = "sleep(2) dropped them"
        if not self.asleep:
            self._sleep_level = None
        self._observer.awake(tags=self.asleep)
        self._end_pause_of_sleep()

    # ---- weights ----

    def start_weight_update(self, *, allow_unpaused: bool = False) -> None:
        """Open a weight session.

        Raises:
            Conflict: a session is open; the weights are asleep; a pause is pending; not paused, without `allow_unpaused`.
            UpdateFailed: the weight target could not begin; nothing changed.
        """
        if self.update_open:
            raise Conflict("a weight session is open already; finish it first")
        if "weights" in self.asleep:
            raise Conflict("the weights are asleep; wake them up first: wake_up(['weights'])")
        if self.pause_pending:
            raise Conflict("a pause is pending: start the weight update when it has taken effect")
        if not self.is_paused() and not allow_unpaused:
            raise Conflict("a weight update needs an effective pause; pause first, or pass allow_unpaused=True")
        try:
            self.weight_target.begin()
        except Exception as error:
            self._update_failed("start", error, wrote=False)
        self._session = WeightSession(self.weight_target)
        self._observer.update_started()

    def update_weights(self, tensors: NamedTensors) -> None:
        """Write named tensors in place, one by one as the iterable yields them; any number of calls a session.

        Raises:
            Conflict: no session is open.
            UpdateFailed: a tensor does not fit, or the source raised. If this session has written nothing, it stays open
                and nothing changed; otherwise it is closed and the engine is out of service.
        """
        session = self._open_session("update_weights")
        try:
            num_tensors, num_bytes = session.write(tensors)
        except BaseException as error:
            self._update_failed("update", error, wrote=session.wrote)
        self._observer.part_received(tensors=num_tensors, num_bytes=num_bytes)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Close the session: tokens sampled from now on belong to `weight_version`, or to the label that was resident.

        Raises:
            Conflict: no session is open; or, out of service, some weight was not sent (the session stays open).
            InvalidArgument: an empty version.
            UpdateFailed: the weight target could not commit; as for `update_weights`.
        """
        session = self._open_session("finish_weight_update")
        _check_version(weight_version)
        missing = session.missing
        if self.is_out_of_service and missing:
            raise Conflict(
                f"out of service: a full update is needed, and {len(missing)} weights were not sent, first of them {missing[0]!r}"
            )
        try:
            self.weight_target.commit()
        except BaseException as error:
            self._update_failed("finish", error, wrote=session.wrote)
        self._session = None
        if weight_version is not None:
            self._weight_version = weight_version
        self._observer.committed(self._weight_version)
        if self.is_out_of_service:
            self._return_to_service()
        self._end_pause_of_sleep()

    def load_weights(self, source: str | Path | dict[str, torch.Tensor] | NamedTensors, weight_version: str | None = None) -> None:
        """The whole session in one: start, one part, finish.

        Args:
            source: a checkpoint folder, a state dict, or (name, tensor) pairs.
            weight_version: the new label; None keeps the old one.

        Raises:
            EngineError: as the phases do. A session that this call opened is closed again.
        """
        _check_version(weight_version)
        tensors = tensors_of(source)
        self.start_weight_update()
        try:
            self.update_weights(tensors)
            self.finish_weight_update(weight_version)
        except BaseException:
            self._session = None
            raise

    def update_weight_version(self, version: str, *, allow_unpaused: bool = False) -> None:
        """Set the label without touching weights.

        Raises:
            Conflict: no pause is effective, without `allow_unpaused`.
            InvalidArgument: an empty version.
        """
        _check_version(version)
        if (not self.is_paused() or self.pause_pending) and not allow_unpaused:
            raise Conflict("the version may change only while a pause is effective; pause first, or pass allow_unpaused=True")
        self._weight_version = version
        self._observer.relabelled(version)

    def weight_checksums(self) -> dict[str, str]:
        """A checksum of each weight as it lies in memory, by name; computed where it lies.

        Raises:
            Conflict: the weights are asleep.
        """
        if "weights" in self.asleep:
            raise Conflict("the weights are asleep; wake them up first: wake_up(['weights'])")
        return {name: checksum(tensor) for name, tensor in named_weights(self.runner.model)}

    # ---- the inside ----

    @property
    def _may_launch(self) -> bool:
        return not self.is_out_of_service and self._pause_mode != "keep" and self.scheduler.has_work

    def _check_forward(self) -> None:
        if self._forward_failure is not None:
            raise ForwardFailed(
                f"an earlier forward pass failed ({self._forward_failure}) and left the KV cache undefined; make a new engine"
            )

    def _forward_failed(self, step: int, error: BaseException) -> None:
        self._forward_failure = _describe(error)
        self._observer.step_failed(step, why=self._forward_failure)

    def _check_request(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        config, length = self.config, len(prompt_token_ids)
        if length == 0:
            raise InvalidArgument("the prompt is empty; expected at least one token")
        if length >= config.max_model_len:
            raise InvalidArgument(f"the prompt has {length} tokens; expected fewer than max_model_len ({config.max_model_len})")
        params.check()
        longest = min(length + params.max_tokens, config.max_model_len)
        if (needed := -(-longest // config.block_size)) > config.num_blocks:
            raise InvalidArgument(
                f"{longest} tokens need {needed} blocks, the pool has {config.num_blocks}; lower max_tokens or the prompt"
            )
        if (worst := max(prompt_token_ids)) >= self.runner.vocab_size or (worst := min(prompt_token_ids)) < 0:
            raise InvalidArgument(f"token {worst} is outside the vocabulary of {self.runner.vocab_size}")
        if request_id in self.scheduler.requests:
            raise InvalidArgument(f"request {request_id!r} exists already; wait for its end or choose another id")

    def _abort(self, request: Request) -> None:
        self.scheduler.finish(request, "abort")
        self._emit(request, (), "abort")

    def _emit(self, request: Request, tokens: tuple[SampledToken, ...], reason: FinishReason | None) -> None:
        versions = None if reason is None else request.weight_versions
        first = request.num_output_tokens - len(tokens)
        token_ids = tuple(token.token_id for token in tokens)
        logprobs = tuple(token.logprobs for token in tokens if token.logprobs is not None)
        asked = request.params.logprobs is not None
        self._outputs.append(EngineCoreOutput(request.request_id, first, token_ids, reason, versions, logprobs if asked else None))

    @property
    def _clear_asked(self) -> bool:
        return any(ticket.clear_cache for ticket in self._tickets)

    def _check_pause(self, mode: PauseMode) -> None:
        if mode not in get_args(PauseMode):
            raise InvalidArgument(f"pause mode must be one of {', '.join(get_args(PauseMode))}, got {mode!r}")
        if mode != "wait" or not self.scheduler.has_live_requests:
            return
        if self._failed_update is not None:
            raise OutOfService(f"`wait` would run requests on half-written weights ({self._failed_update}); keep or abort them")
        if self.update_open:
            raise Conflict("`wait` would run requests while a weight session is open; finish it first, or keep or abort them")
        if self.is_sleeping():
            raise Conflict(f"`wait` would run requests while asleep (level {self._sleep_level}); wake up first, or keep or abort them")

    def _take_up(self, ticket: PauseTicket, *, call: str) -> PauseTicket:
        if ticket.mode == "keep" and self._pause_mode == "wait":
            self._supersede([pending for pending in self._tickets if pending.mode == "wait"], by=f"{call}('keep')")
        self._tickets.append(ticket)
        self._pause_mode = ticket.mode
        if ticket.mode == "wait":
            self.scheduler.unpark()
        self._observer.pause_pending(ticket.mode, clear_cache=self._clear_asked)
        if ticket.mode == "abort":
            for pending in self._tickets:
                pending.mode = "abort"
            for request in list(self.scheduler.requests.values()):
                if request.status is not RequestStatus.BLOCKED:
                    self._abort(request)
        return ticket

    def _end_pause(self, *, by: str) -> None:
        self._supersede(self._tickets, by=by)
        self._pause_mode, self._pause_asked = None, False
        self.scheduler.unpark()
        self._observer.resumed()
        self.scheduler.accept_blocked()

    def _end_pause_of_sleep(self) -> None:
        """End a pause that only sleep made, unless a resume would be refused."""
        ours = self.is_paused() and not (self.pause_pending or self._pause_asked)
        if ours and not (self.is_sleeping() or self.update_open or self.is_out_of_service):
            self._end_pause(by="wake_up")

    def _fall_asleep(self, level: int) -> None:
        """Give back what is awake; a higher level that is in force stays."""
        self._sleep_level = level = max(level, self._sleep_level or 0)
        if level >= 1:
            self.runner.memory["kv_cache"].give_back(keep_copy=False)
            self.runner.memory["weights"].give_back(keep_copy=level == 1)
        self._observer.asleep(level, tags=self.asleep)

    def _supersede(self, tickets: Sequence[PauseTicket], *, by: str) -> None:
        for ticket in tickets:
            ticket.supersede(by)
        self._tickets = [ticket for ticket in self._tickets if not ticket.done]

    def _clear_cache(self) -> None:
        self.scheduler.preempt_all()
        success = self._clear_tiers()
        assert success, "only running requests hold blocks"

    def _clear_tiers(self) -> bool:
        """Forget all KV, on the device and on the host, if no request holds a block."""
        pool, host = self.scheduler.pool, self.scheduler.host
        success = pool.clear()
        self._observer.cleared(success=success, empty=pool.is_empty)
        if success and self.config.host_blocks:
            host.clear()
            self._observer.cleared(success=True, empty=host.is_empty, tier="host")
        return success

    def _open_session(self, call: str) -> WeightSession:
        if self._session is None:
            raise Conflict(f"{call} without an open weight session; call start_weight_update first")
        return self._session

    def _update_failed(self, phase: Literal["start", "update", "finish"], error: BaseException, *, wrote: bool) -> NoReturn:
        """Half-written weights are not served, whatever broke in; what is no error, as Ctrl-C, goes on to who asked for it."""
        why = _describe(error)
        if wrote:
            self._session = None
            self._failed_update = f"{phase}: {why}"
        self._observer.update_failed(phase, wrote=wrote, why=why)
        if not isinstance(error, Exception):
            raise error
        outcome = "the engine is out of service until a full update succeeds" if wrote else "nothing was written"
        raise UpdateFailed(f"weight update failed in {phase}: {why}; {outcome}", wrote=wrote) from error

    def _return_to_service(self) -> None:
        self._failed_update = None
        if not self.is_paused():
            self.scheduler.unpark()
            self.scheduler.accept_blocked()


def _check_version(version: str | None) -> None:
    if version is not None and (not isinstance(version, str) or not version):
        raise InvalidArgument(f"a weight version must be a string of at least one character, got {version!r}")


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
