"""The engine as a state machine: requests, steps, pauses, weights and versions.

Synchronous and single-threaded: nothing happens between two calls. Whoever drives it
repeats: take up operations, `step` while `has_work`, hand over `take_outputs`,
then `pause_complete`. Transitions are reported to the observer in the order that
docs/semantics.md fixes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NoReturn, get_args

import torch

from .config import EngineConfig, SamplingParams
from .errors import CacheBusy, Conflict, ForwardFailed, InvalidArgument, OutOfService, RequestRejected, UpdateFailed
from .model_runner import ModelRunner
from .observer import Observer
from .outputs import FinishReason, PauseMode, PauseTicket, RequestOutput
from .request import Request, RequestStatus
from .sampler import SampledToken
from .scheduler import Scheduler
from .weights import NamedTensors, WeightSession, WeightTarget, tensors_of

DEFAULT_VERSION = "default"
"""The version label before any update."""


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
        self._outputs: list[RequestOutput] = []
        self._num_steps = 0
        self._forward_failure: str | None = None
        self._pause_mode: PauseMode | None = None
        self._tickets: list[PauseTicket] = []  # pause calls taken up and not yet done, in order
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

    @property
    def is_out_of_service(self) -> bool:
        """A weight update failed after its first byte, and no full update has succeeded since."""
        return self._failed_update is not None

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

    def take_outputs(self) -> list[RequestOutput]:
        """Everything produced since the last call, in order. A pause takes effect only when outputs have been taken."""
        outputs, self._outputs = self._outputs, []
        return outputs

    # ---- steps ----

    def has_work(self) -> bool:
        """Whether `step` would run a forward pass."""
        return not self.is_out_of_service and self._pause_mode != "keep" and self.scheduler.has_work

    def step(self) -> None:
        """Run one forward pass over the next batch; without work, do nothing.

        Raises:
            NotFinite: logits hold NaN or infinity; nothing was sampled, and no step may follow.
            ForwardFailed: an earlier forward pass raised. What it raised came through `step` unchanged.
        """
        if self._forward_failure is not None:
            raise ForwardFailed(
                f"an earlier forward pass failed ({self._forward_failure}) and left the KV cache undefined; make a new engine"
            )
        if not self.has_work():
            return
        batch = self.scheduler.schedule()
        assert batch, "the first running or waiting request always fits: submit refuses what the pool cannot hold"
        self._num_steps += 1
        self._observer.launched(self._num_steps, tuple((request.request_id, first, num_tokens) for request, first, num_tokens in batch))
        sampling = [share for share in batch if share.samples]
        try:
            sampled = self.runner.execute(batch)
        except BaseException as error:
            self._forward_failure = _describe(error)
            self._observer.step_failed(self._num_steps, why=self._forward_failure)
            raise
        ids = [share.request.request_id for share in sampling]
        token_ids = [token.token_id for token in sampled]
        self._observer.landed(self._num_steps, tuple(zip(ids, token_ids, strict=True)))
        reasons = self.scheduler.land(sampling, token_ids, version=self._weight_version)
        for (request, _, _), token, reason in zip(sampling, sampled, reasons, strict=True):
            self._emit(request, (token,), reason)

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
            OutOfService, Conflict: `wait` for live requests, with weights that nothing may be sampled from.
        """
        if mode not in get_args(PauseMode):
            raise InvalidArgument(f"pause mode must be one of {', '.join(get_args(PauseMode))}, got {mode!r}")
        if mode == "wait" and self.scheduler.has_live_requests:
            if self._failed_update is not None:
                raise OutOfService(f"pause('wait') would run requests on half-written weights ({self._failed_update}); keep or abort them")
            if self.update_open:
                raise Conflict("pause('wait') would run requests while a weight session is open; finish it first, or keep or abort them")
        if mode == "keep" and self._pause_mode == "wait":
            self._supersede([ticket for ticket in self._tickets if ticket.mode == "wait"], by="pause('keep')")
        ticket = PauseTicket(mode, clear_cache)
        self._tickets.append(ticket)
        self._pause_mode = mode
        if mode == "wait":
            self.scheduler.unpark()
        self._observer.pause_pending(mode, clear_cache=self._clear_asked)
        if mode == "abort":
            for pending in self._tickets:
                pending.mode = "abort"
            for request in list(self.scheduler.requests.values()):
                if request.status is not RequestStatus.BLOCKED:
                    self._abort(request)
        return ticket

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
        return True

    def pause(
        self, mode: PauseMode = "abort", *, clear_cache: bool = True, wait_for_inflight_requests: bool | None = None
    ) -> list[RequestOutput]:
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
        outputs = self.take_outputs()
        completed = self.pause_complete()
        assert completed
        return outputs

    def resume(self) -> None:
        """End the pause, superseding it if it is pending; while running, do nothing.

        Raises:
            Conflict: a weight session is open.
            OutOfService: an update failed half-way.
        """
        if self.update_open:
            raise Conflict("resume while a weight session is open; finish the update first")
        if self._failed_update is not None:
            raise OutOfService(f"resume refused: a weight update failed half-way ({self._failed_update}); send a full update first")
        if self._pause_mode is None:
            return
        self._supersede(self._tickets, by="resume")
        self._pause_mode = None
        self.scheduler.unpark()
        self._observer.resumed()
        self.scheduler.accept_blocked()

    def reset_prefix_cache(self) -> None:
        """Forget all KV that no request needs; while a pause is effective, frozen requests give theirs up too.

        Raises:
            CacheBusy: requests hold blocks and no pause is effective.
        """
        if self.is_paused() and not self.pause_pending:
            self._clear_cache()
            return
        success = self.scheduler.pool.clear()
        self._observer.cleared(success=success, empty=self.scheduler.pool.is_empty)
        if not success:
            held = self.config.num_blocks - self.scheduler.pool.num_free
            raise CacheBusy(f"{held} of {self.config.num_blocks} blocks are held by requests; pause first, or reset when nothing runs")

    # ---- weights ----

    def start_weight_update(self, *, allow_unpaused: bool = False) -> None:
        """Open a weight session.

        Raises:
            Conflict: a session is open; a pause is pending; not paused, without `allow_unpaused`.
            UpdateFailed: the weight target could not begin; nothing changed.
        """
        if self.update_open:
            raise Conflict("a weight session is open already; finish it first")
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

    # ---- the inside ----

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
        self._outputs.append(RequestOutput(request.request_id, first, token_ids, reason, versions, logprobs if asked else None))

    @property
    def _clear_asked(self) -> bool:
        return any(ticket.clear_cache for ticket in self._tickets)

    def _supersede(self, tickets: Sequence[PauseTicket], *, by: str) -> None:
        for ticket in tickets:
            ticket.supersede(by)
        self._tickets = [ticket for ticket in self._tickets if not ticket.done]

    def _clear_cache(self) -> None:
        self.scheduler.preempt_all()
        success = self.scheduler.pool.clear()
        assert success, "only running requests hold blocks"
        self._observer.cleared(success=True, empty=self.scheduler.pool.is_empty)

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
