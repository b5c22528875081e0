"""What a live vLLM engine core does, on its way into a log: a transaction for each operation it takes up and for each step.

`Transitions` says what scheduler and block manager do; this adds who asked for it, what was handed out, pauses and
weights, and writes it. Nothing here imports vLLM, and nothing here can hurt it: whatever goes wrong in watching or
writing ends the recording, with one warning, and the engine goes on as if nobody had ever looked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from traceback import walk_tb
from types import CodeType
from typing import Any, NamedTuple, get_args

import msgspec

from harness import events as ev
from harness.backends.vllm.transitions import Transitions, Wrapper
from harness.codec import Decode
from harness.log import LogWriter

UNKNOWN_SOURCE = {"checkpoint": "unknown"}
"""Where weights came from, for all that an engine core can see."""

WEIGHT_CALLS = ("reload_weights",)
"""Methods of vLLM's worker that write weights outside of a session."""

PAST_THE_BOUND = 4
"""How many times its bound a log may grow while it waits for a moment at which another can begin."""

_REASONS = get_args(ev.FinishReason)


class CannotRecord(Exception):
    """Something that a log has no words for."""


class Settings(NamedTuple):
    """What the user asked for."""

    folder: Callable[[int], Path] | None
    """Where the first log, the second, ... goes; None: nowhere until `begin` is called."""
    bytes: int
    """From this size on a log ends, and another begins, at the next moment that allows it."""
    weight_calls: tuple[str, ...] = WEIGHT_CALLS


class Progress:
    """What a live request has handed out."""

    __slots__ = ("delivered", "name", "span_starts")

    def __init__(self, name: str) -> None:
        self.name = name
        self.delivered = 0
        self.span_starts: list[tuple[str, int]] = []
        """Each label that its tokens went out under, and the output index from which on; as vLLM's front end counts them."""

    def spans(self) -> list[ev.VersionSpan]:
        ends = [start for _, start in self.span_starts[1:]] + [self.delivered]
        return [ev.VersionSpan(version, start, end) for (version, start), end in zip(self.span_starts, ends, strict=False)]


class Recording:
    """Watches the scheduler of one engine core, and is told by hooks what the core is asked for.

    Args:
        scheduler: a new one, of vLLM.
        opened: what a log says first; the clock's base is filled in.
        called: what one of vLLM's requests is called in the log.
        settings: where to, how much.
        reports_spans: whether this version of vLLM tells callers which version sampled which tokens.
        warn: told once why a recording ended.
    """

    def __init__(
        self,
        scheduler: Any,
        opened: ev.Opened,
        settings: Settings,
        *,
        called: Callable[[Any], str],
        reports_spans: bool,
        warn: Callable[[str], None],
    ) -> None:
        self._called = called
        self._scheduler = scheduler
        self._opened = opened
        self._settings = settings
        self._reports_spans = reports_spans
        self._warn = warn
        self._writer: LogWriter | None = None
        """None: no log is open, and what happens is followed all the same."""
        self._logs = self._ops = self._base_ns = self._began_ns = self._last_ns = 0
        self._read_along = False
        self._gave_up = False
        self._label = "default"
        self._mode: ev.Mode | None = None
        """That of the pause in force or pending."""
        self._effective = False
        self._pending: list[int] = []
        """Pause calls that have not returned."""
        self._session_open = self._session_wrote = False
        self._progress: dict[str, Progress] = {}
        self._handed: tuple[list[str], list[Progress]] = [], []
        """Whom the last step handed a token under the label in force and who goes on: as a rule those of the next step."""
        self._in_flight = 0
        self._within = False
        """An operation is being carried out: what happens now belongs to it."""
        self._hooked: dict[Callable[..., Any], Callable[..., Any]] = {}
        """Methods of the engine core, each with its hook around it."""
        self._transitions = self._watch()
        if settings.folder is not None:
            try:
                self._begin_next()
            except Exception as error:
                self.give_up(error)

    # ---- safety ----

    def guard(self, wrapper: Wrapper) -> Wrapper:
        """A wrapper whose failure ends the recording and nothing else: the engine gets what the wrapped method gives."""

        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            under_way: list[list[Any]] = []
            """For each call that is being made, what the wrapped method gave in it, so that it is never called twice for one."""

            def once(*args: Any, **kwargs: Any) -> Any:
                result = original(*args, **kwargs)
                under_way[-1].append(result)
                return result

            once.__self__ = getattr(original, "__self__", None)  # type: ignore[attr-defined]
            watched = wrapper(once)

            def guarded(*args: Any, **kwargs: Any) -> Any:
                if self._gave_up:
                    return original(*args, **kwargs)
                results: list[Any] = []
                under_way.append(results)
                try:
                    return watched(*args, **kwargs)
                except Exception as error:
                    if not results and _came_through(error, once.__code__):
                        raise  # vLLM's own
                    self.give_up(error)
                    return results[0] if results else original(*args, **kwargs)
                finally:
                    under_way.pop()

            return guarded

        return wrap

    def around(self, original: Callable[..., Any], hook: Callable[..., Any], core: Any) -> Callable[..., Any]:
        """A method of the engine core that this scheduler serves, with a hook of ours around it: made once, as a step calls some."""
        if (hooked := self._hooked.get(original)) is None:
            hooked = self._hooked[original] = self.guard(hook.__get__(self))(partial(original, core))
        return hooked

    def give_up(self, error: Exception) -> None:
        """Record nothing any more. What was written stays, without a `closed`."""
        if self._gave_up:  # in a method that was called by the one that is being left
            return
        self._gave_up = True
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        reason = str(error) if isinstance(error, CannotRecord) else f"{type(error).__name__}: {error}"
        self._warn(f"Caesura stopped recording; serving goes on. {reason}")

    # ---- logs ----

    def begin(self, folder: Path, *, eos_token_ids: tuple[int, ...] | None = None) -> None:
        """Begin a log in `folder`.

        Args:
            eos_token_ids: the tokens that end a request which says nothing of it, if somebody knows better than vLLM's configuration;
                who does so reads along, and finds a launch in the log before the step has landed.

        Raises:
            CannotRecord: the recording had ended by a failure, or the engine is not as new: something is live, in flight, cached or open.
            LogError: the folder cannot be written, or has this rank's log already.
        """
        if self._gave_up:
            raise CannotRecord("recording has failed before in this engine: its log says why, start another")
        if not self._as_new:
            raise CannotRecord("a log begins where nothing is live, in flight, cached or half-updated: wait and clear the cache first")
        # In the engine's own thread: a thread for writing was tried, and cost more in handing the interpreter over than it took off.
        self._writer = LogWriter(folder, f"r{self._opened.rank}")
        self._base_ns = self._began_ns = time.monotonic_ns()
        self._last_ns = self._ops = 0
        self._read_along = eos_token_ids is not None
        if eos_token_ids is not None:
            self._opened = msgspec.structs.replace(self._opened, eos_token_ids=eos_token_ids)
        self._transitions.begin()
        self._write([msgspec.structs.replace(self._opened, clock_base_ns=self._base_ns)])
        self._restate()

    def end(self, why: str) -> None:
        """End the log, if one is open."""
        if self._writer is None:
            return
        self._flush()
        self._write([ev.Closed(why=why, count=self._writer.seq)])
        self._writer.close()
        self._writer = None

    def _begin_next(self) -> None:
        assert self._settings.folder is not None
        self._logs += 1
        self.begin(self._settings.folder(self._logs))

    @property
    def _as_new(self) -> bool:
        """Whether a new engine could be in this state, but for a label and a pause without anybody in it."""
        live = self._scheduler.requests or self._scheduler.finished_req_ids
        busy = self._session_open or self._pending or self._in_flight
        return not live and not busy and not self._scheduler.kv_cache_manager.block_pool.cached_block_hash_to_block._cache

    def _restate(self) -> None:
        """Say of label and pause what a reader would otherwise take to be as in a new engine; labels change under a pause."""
        if self._label == "default" and self._mode is None:
            return
        pause: dict[str, Any] = {"mode": self._mode or "keep", "clear_cache": False}
        events = [ev.PausePending(**pause), ev.PauseEffective(**pause)]
        self._tell({"pause": pause}, events, {"status": "paused"}, by="recorder")
        if self._label != "default":
            answer = {"weight_version": self._label}
            self._tell({"update_weight_version": {"version": self._label}}, [ev.Relabelled(version=self._label)], answer, by="recorder")
        if self._mode is None:
            self._tell({"resume": {}}, [ev.Resumed()], {"status": "resumed"}, by="recorder")

    def _turn_page(self) -> None:
        """A log that has reached its bound ends where another can begin."""
        if self._writer is None or self._settings.folder is None:
            return
        size, bound = self._writer.path.stat().st_size, self._settings.bytes
        if size >= bound and self._as_new:
            self.end("drained")
            self._begin_next()
        elif size > PAST_THE_BOUND * bound:
            raise CannotRecord(
                f"{self._writer.path} has {size} bytes, and since it had {bound} there was no moment at which nothing was live or "
                "cached, so that another log could begin: a pause that clears and keeps nobody is one"
            )

    # ---- transactions ----

    def _write(self, events: Sequence[ev.Event | Decode]) -> None:
        """What has happened together since `_began_ns`: clients may hear of it before it is written."""
        if self._writer is not None:
            self._last_ns = max(self._last_ns, self._began_ns - self._base_ns)
            self._writer.append(self._last_ns, events)

    def _flush(self) -> None:
        self._write(self._transitions.take_short())

    def _tell(
        self, operation: dict[str, Any], events: Sequence[ev.Event], answer: dict[str, Any] | ev.Failure | None, *, by: str = "client"
    ) -> int:
        """Write the transaction of an operation; None as its answer: it returns later. Returns the operation's number."""
        op, self._ops = self._ops, self._ops + 1
        error = answer if isinstance(answer, ev.Failure) else None
        returned = [] if answer is None else [ev.Returned(op=op, answer=None if error else answer, error=error)]  # type: ignore[arg-type]
        self._write([ev.Called(op=op, operation=operation, by=by), ev.Received(op=op), *events, *returned])
        return op

    @contextmanager
    def _operation(self) -> Iterator[None]:
        """What scheduler and block manager do in here belongs to one operation; what they did before is written before."""
        self._flush()
        self._began_ns = time.monotonic_ns()
        self._within = True
        try:
            yield
        finally:
            self._within = False

    # ---- the scheduler: one wrapper for each method, original -> what is called instead ----

    def _watch(self) -> Transitions:
        scheduler = self._scheduler
        transitions = Transitions(scheduler, called=self._called, guard=self.guard)
        for name, wrapper in (
            ("schedule", self._schedule),
            ("update_from_output", self._update_from_output),
            ("add_request", self._add_request),
            ("finish_requests", self._finish_requests),
            ("reset_prefix_cache", self._reset_prefix_cache),
        ):
            setattr(scheduler, name, self.guard(wrapper)(getattr(scheduler, name)))
        return transitions

    def _schedule(self, schedule: Callable[..., Any]) -> Callable[..., Any]:
        """A launch is written with what comes next, as a rule its landing: a steady step is one short line then."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._began_ns = time.monotonic_ns()
            output = schedule(*args, **kwargs)
            self._in_flight += 1
            if self._read_along:
                self._flush()
            return output

        return watched

    def _update_from_output(self, update: Callable[..., Any]) -> Callable[..., Any]:
        def watched(scheduler_output: Any, model_runner_output: Any) -> Any:
            self._began_ns = time.monotonic_ns()
            by_client = update(scheduler_output, model_runner_output)
            self._in_flight -= 1
            outputs = [output for of_client in by_client.values() for output in of_client.outputs]
            if len(by_client) > 1:
                place = {request_id: place for place, request_id in enumerate(scheduler_output.num_scheduled_tokens)}
                outputs.sort(key=lambda output: place[output.request_id])
            if not self._hand_out(outputs):
                self._deliver((output.request_id, output.new_token_ids, output.finish_reason) for output in outputs)
            self._flush()
            return by_client

        return watched

    def _hand_out(self, outputs: list[Any]) -> bool:
        """Note what the step handed out if it can be told in columns, as most steps can; returns whether it was."""
        ids, (known, handed) = [output.request_id for output in outputs], self._handed
        if not ids or ids != known or any([output.finish_reason is not None for output in outputs]):
            return False
        rows, firsts = [output.new_token_ids for output in outputs], [progress.delivered for progress in handed]
        if not self._transitions.hand_out(ids, rows, firsts):
            return False
        for progress in handed:
            progress.delivered += 1
        return True

    def _deliver(self, outputs: Iterable[tuple[str, Sequence[int], Any]]) -> None:
        """Hand out tokens of requests, with the reason if that was the last of it."""
        handed = []
        going_on: tuple[list[str], list[Progress]] = [], []
        for request_id, tokens, finish_reason in outputs:
            progress = self._progress[request_id]
            reason = None if finish_reason is None else str(finish_reason)
            if tokens and (not progress.span_starts or progress.span_starts[-1][0] != self._label):
                progress.span_starts.append((self._label, progress.delivered))
            handed.append(ev.Output(progress.name, progress.delivered, tuple(tokens), reason))  # type: ignore[arg-type]
            progress.delivered += len(tokens)
            if reason is not None:
                self._ended(request_id, reason)
            elif tokens:
                going_on[0].append(request_id)
                going_on[1].append(progress)
        self._handed = going_on
        if handed:
            self._transitions.add(ev.Delivered(outputs=tuple(handed)))

    def _ended(self, request_id: str, reason: str) -> None:
        if reason not in _REASONS:
            raise CannotRecord(f"request {request_id} ended by {reason}: a log knows {', '.join(_REASONS)}")
        progress = self._progress.pop(request_id)
        if self._reports_spans:
            self._transitions.report_spans(progress.name, progress.spans())

    def _add_request(self, add: Callable[..., Any]) -> Callable[..., Any]:
        def watched(request: Any) -> Any:
            name, parked = self._called(request), self._mode is not None
            operation = submission(request, name, eos_token_ids=self._opened.eos_token_ids)
            with self._operation():
                result = add(request)
            self._progress[request.request_id] = Progress(name)
            accepted = ev.Accepted(request=name, parked=parked)
            self._tell(operation, [accepted], {"state": "parked" if parked else "queued"})
            self._turn_page()
            return result

        return watched

    def _finish_requests(self, finish: Callable[..., Any]) -> Callable[..., Any]:
        """Several ids come as a set: they are said in the order in which vLLM took them. Every abort comes twice, at once and
        in its turn among the other calls: one that finds nobody leaves no trace."""

        def watched(request_ids: Any, *args: Any, **kwargs: Any) -> Any:
            if self._within:
                requests = finish(request_ids, *args, **kwargs)
                self._deliver_aborted(requests)
                return requests
            with self._operation():
                requests = finish(request_ids, *args, **kwargs)
                self._deliver_aborted(requests)
            if requests:
                ids = [self._called(request) for request in requests]
                self._tell({"abort": {"ids": ids}}, self._transitions.take(), {"aborted": len(requests)})
            return requests

        return watched

    def _deliver_aborted(self, requests: Iterable[Any]) -> None:
        """An aborted request's last output is made by the core or by the front end, and is empty either way."""
        self._deliver((request.request_id, (), request.get_finished_reason()) for request in requests)

    def _reset_prefix_cache(self, reset: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            if self._within:
                return reset(*args, **kwargs)
            with self._operation():
                success = reset(*args, **kwargs)
            answer = {"status": "reset"} if success else ev.Failure("busy", "vLLM answers false: blocks are held")
            self._tell({"reset_prefix_cache": {}}, self._transitions.take(), answer)
            self._turn_page()
            return success

        return watched

    # ---- the engine core: one hook for each method of it ----

    def pause_scheduler(self, pause: Callable[..., Any]) -> Callable[..., Any]:
        """The call returns at once, or with a future once the core has run dry; pending ones return the newest first."""

        def watched(mode: ev.Mode = "abort", clear_cache: bool = True) -> Any:
            before, effective = self._mode, self._effective
            with self._operation():
                self._transitions.add(ev.PausePending(mode=mode, clear_cache=clear_cache))
                self._mode, self._effective = mode, False
                try:
                    future = pause(mode=mode, clear_cache=clear_cache)
                except ValueError:  # no such mode, or one that this engine cannot: nothing was done
                    self._mode, self._effective = before, effective
                    self._transitions.take()
                    raise
            told = {"pause": {"mode": mode, "clear_cache": clear_cache}}
            if isinstance(future, Future):
                self._pending.append(self._tell(told, self._transitions.take(), None))
                future.add_done_callback(self._completion(clear_cache, self._pending[-1]))
                return future
            self._take_effect(clear_cache)
            self._tell(told, self._transitions.take(), {"status": "paused"})
            self._turn_page()
            return future

        return watched

    def _completion(self, clear_cache: bool, op: int) -> Callable[[Future[Any]], None]:
        def complete(future: Future[Any]) -> None:
            self._pending.remove(op)
            self._began_ns = time.monotonic_ns()
            error = None if (raised := future.exception()) is None else ev.Failure("failed", str(raised))
            self._take_effect(clear_cache)
            self._transitions.add(ev.Returned(op=op, answer=None if error else {"status": "paused"}, error=error))
            self._flush()
            self._turn_page()

        return self.guard(lambda _: complete)(_nothing)

    def _take_effect(self, clear_cache: bool) -> None:
        if self._mode is not None and not self._effective:
            self._effective = True
            self._transitions.add(ev.PauseEffective(mode=self._mode, clear_cache=clear_cache))

    def reset_caches(self, reset: Callable[..., Any]) -> Callable[..., Any]:
        """The clear of a pause that completes: what it does goes before `pause_effective`."""

        def watched(*args: Any, **kwargs: Any) -> Any:
            outer, self._within = self._within, True
            try:
                return reset(*args, **kwargs)
            finally:
                self._within = outer

        return watched

    def resume_scheduler(self, resume: Callable[..., Any]) -> Callable[..., Any]:
        def watched() -> Any:
            if self._within:  # that of the class above
                return resume()
            with self._operation():
                try:
                    result = resume()
                except RuntimeError as error:  # ranks that step together refuse it while their pause is pending
                    self._tell({"resume": {}}, [], ev.Failure("conflict", str(error)))
                    raise
            events = [] if self._mode is None else [ev.Resumed()]
            self._mode = None
            self._tell({"resume": {}}, events, {"status": "resumed"})
            return result

        return watched

    def is_scheduler_paused(self, is_paused: Callable[..., Any]) -> Callable[..., Any]:
        def watched() -> Any:
            with self._operation():
                paused = is_paused()
            self._tell({"is_paused": {}}, [], {"is_paused": paused})
            return paused

        return watched

    def set_weight_version(self, set_version: Callable[..., Any]) -> Callable[..., Any]:
        def watched(weight_version: str) -> Any:
            with self._operation():
                result = set_version(weight_version)
            self._label = weight_version
            self._handed = [], []
            relabelled = ev.Relabelled(version=weight_version)
            self._tell({"update_weight_version": {"version": weight_version}}, [relabelled], {"weight_version": weight_version})
            return result

        return watched

    def collective_rpc(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Of what workers are called for, that which is about weights."""

        def watched(method: Any, *args: Any, **kwargs: Any) -> Any:
            report = self._weight_calls.get(method) if isinstance(method, str) else None
            if report is None:
                return call(method, *args, **kwargs)
            told = _told(*args, **kwargs)
            with self._operation():
                try:
                    result = call(method, *args, **kwargs)
                except Exception as error:
                    report(told, error)
                    raise
            report(told, None)
            return result

        return watched

    def step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """vLLM's engine core does not survive a step that raises."""

        def watched() -> Any:
            try:
                return step()
            except Exception as error:
                failed = self._transitions.steps - self._in_flight + 1
                self._transitions.add(ev.StepFailed(step=failed, why=f"{type(error).__name__}: {error}"))
                self.end("failed")
                raise

        return watched

    def shutdown(self, shutdown: Callable[..., Any]) -> Callable[..., Any]:
        """The log ends before anything is torn down: who shuts down may not wait for the rest."""

        def watched() -> Any:
            self.end("drained" if not self._scheduler.requests else "interrupted" if self._mode is None else "paused")
            return shutdown()

        return watched

    # ---- weights, as the core sees them: a call to its workers that succeeds or raises ----

    @property
    def _weight_calls(self) -> dict[str, Callable[[dict[str, Any], Exception | None], None]]:
        return {
            "start_weight_update": self._start,
            "update_weights": self._update,
            "finish_weight_update": self._finish,
            **dict.fromkeys(self._settings.weight_calls, self._swap),
        }

    def _start(self, told: dict[str, Any], error: Exception | None) -> None:
        self._phase("start", {}, error, [ev.UpdateStarted()], {"status": "started"}, refused=self._session_open)
        if error is None:
            self._session_open, self._session_wrote = True, False

    def _update(self, told: dict[str, Any], error: Exception | None) -> None:
        was_open = self._session_open
        if was_open:
            self._session_wrote, self._session_open = True, error is None
        self._phase("update", told, error, [_received(told)], {"status": "updated"}, refused=not was_open)

    def _finish(self, told: dict[str, Any], error: Exception | None) -> None:
        was_open = self._session_open
        committed, answer = ev.Committed(version=self._label), {"status": "finished", "weight_version": self._label}
        self._phase("finish", {}, error, [committed], answer, refused=not was_open)
        self._session_open = was_open and error is not None

    def _phase(
        self, phase: Any, fields: dict[str, Any], error: Exception | None, events: list[ev.Event], answer: dict[str, Any], *, refused: bool
    ) -> None:
        verb = {"start": "start_weight_update", "update": "update_weights", "finish": "finish_weight_update"}[phase]
        if error is None:
            self._tell({verb: fields}, events, answer)
        elif refused:
            self._tell({verb: fields}, [], ev.Failure("conflict", str(error)))
        else:
            wrote = phase != "start" and self._session_wrote
            failed = ev.UpdateFailed(phase=phase, wrote=wrote, why=f"{type(error).__name__}: {error}")
            self._tell({verb: {**fields, "fails": True}}, [failed], ev.Failure("failed", str(error)))

    def _swap(self, told: dict[str, Any], error: Exception | None) -> None:
        """Weights written outside of vLLM's sessions: a whole session at once."""
        fields = {"source": told["source"]}
        if error is None:
            events = [ev.UpdateStarted(), _received(told), ev.Committed(version=self._label)]
            self._tell({"swap_weights": fields}, events, {"status": "finished", "weight_version": self._label})
        else:
            failed = ev.UpdateFailed(phase="update", wrote=True, why=f"{type(error).__name__}: {error}")
            self._tell({"swap_weights": {**fields, "fails": True}}, [ev.UpdateStarted(), failed], ev.Failure("failed", str(error)))


def submission(request: Any, name: str, *, eos_token_ids: Sequence[int]) -> dict[str, Any]:
    """vLLM's request as the operation that hands it in under `name`.

    Raises:
        CannotRecord: it asks for something that a log has no words for.
    """
    if (params := request.sampling_params) is None:
        raise CannotRecord(f"Request {request.request_id} asks for pooling, which no log can tell of yet.")
    stops = {*(params.stop_token_ids or ()), *([] if params.eos_token_id is None else [params.eos_token_id])}
    beyond = {
        "multimodal input": bool(request.mm_features),
        "prompt embeddings": request.prompt_token_ids is None,
        "streamed input": getattr(request, "resumable", False),
        "a LoRA adapter": request.lora_request is not None,
        "structured output": request.use_structured_output,
        "log probabilities of its prompt": params.prompt_logprobs is not None,
        f"stop tokens {sorted(stops)}, where the model's are {sorted(eos_token_ids)},": bool(stops) and stops != {*eos_token_ids},
    }
    if asked := [name for name, is_asked in beyond.items() if is_asked]:
        raise CannotRecord(f"Request {request.request_id} asks for {' and '.join(asked)}, which no log can tell of yet.")
    fields = {"id": name, "prompt": {"tokens": list(request.prompt_token_ids)}, "max_tokens": request.max_tokens}
    if request.cache_salt is not None:
        fields["cache_salt"] = request.cache_salt
    if not stops and eos_token_ids:
        fields["ignore_eos"] = True
    if params.temperature:
        fields["temperature"] = float(params.temperature)
    return {"submit": fields}


def _came_through(error: BaseException, code: CodeType) -> bool:
    """Whether the error was raised in a call made by the function of this code."""
    return any(frame.f_code is code for frame, _ in walk_tb(error.__traceback__))


def _nothing(*_: Any) -> None:
    pass


def _told(timeout: Any = None, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None, **_: Any) -> dict[str, Any]:
    """What a call to the workers says of the weights that it brings, as fields of `update_weights`.

    Only a sender of ours says where they come from and which part they are; for others each call is a whole.
    """
    info = (kwargs or {}).get("update_info", args[0] if args else None)
    told = info if isinstance(info, dict) and "source" in info else {}
    return {"source": UNKNOWN_SOURCE, "part": 1, "of": 1} | {name: told[name] for name in ("source", "part", "of") if name in told}


def _received(told: dict[str, Any]) -> ev.PartReceived:
    """What workers receive never comes by here: a part counts as one tensor of no size."""
    return ev.PartReceived(part=told["part"], of=told["of"], tensors=1, bytes=0)
