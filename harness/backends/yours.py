"""Other people's engines: a protocol of a few methods, and what makes a backend of them.

An engine that keeps the protocol is fuzzed, judged and shrunk like ours. It shows level 1, who ran in which step, so
all invariants are checked but those about blocks; who can show blocks writes a `Backend` instead (harness/backends/__init__.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from harness import events as ev
from harness.backends import BackendError, EngineInfo
from harness.operations import Abort, IsPaused, Mode, Operation, Pause, Resume, Submit, SwapWeights
from harness.scenario import EngineShape
from harness.state import EngineState, RequestState
from harness.tokenizer import bytes_of

VERBS = {
    "submit": "submit",
    "abort": "abort",
    "pause": "pause",
    "resume": "resume",
    "is_paused": "is_paused",
    "swap_weights": "swap_weights",
}
"""The operations that such an engine can know, with the method that carries each out."""


class Refused(Exception):
    """An engine says no, and nothing has changed: a bad argument (`invalid`), or the wrong state for this call (`conflict`)."""

    def __init__(self, message: str, *, code: ev.ErrorCode = "invalid") -> None:
        super().__init__(message)
        self.code: ev.ErrorCode = code


class Token(NamedTuple):
    """What a step made of one request: its next token, if it sampled one, and why it ended, if it did."""

    request: str
    token: int | None
    finish_reason: ev.FinishReason | None = None


class Engine(Protocol):
    """An engine under test, made anew for every case; nothing happens in it outside these calls.

    The constructor takes the shape that it is started with: a request may grow to `max_model_len` tokens, and to no more than
    `num_blocks * block_size`. Any method may raise `Refused`; any other exception is the engine's crash. `is_paused() -> bool`
    and `swap_weights(seed, version)` are optional: an engine that has them is asked for these operations, too.
    """

    def submit(self, id: str, prompt: Sequence[int], max_tokens: int) -> None:
        """Take a request on. While paused it waits for resume."""
        ...

    def abort(self, ids: Sequence[str] | None) -> Iterable[str]:
        """End these requests, or all (None); returns those that it ended. Unknown and finished ids are ignored."""
        ...

    def has_work(self) -> bool:
        """Whether `step` would run anything."""
        ...

    def step(self) -> Iterable[Token]:
        """One forward pass: an entry for each request that ran in it."""
        ...

    def pause(self, mode: Mode, clear_cache: bool) -> Iterable[str]:
        """Begin to pause; returns the requests that it aborted."""
        ...

    def quiet(self) -> bool:
        """Whether the pause that was begun has taken effect: asked after each call and each step while one is pending."""
        ...

    def resume(self) -> None: ...


class EngineBackend:
    """An `Engine` behind the methods of a backend. It keeps count of requests, calls and versions as their client would.

    Args:
        make: makes an engine of a given shape.
        name: what reports call it.
    """

    level = 1

    def __init__(self, make: Callable[[EngineShape], Engine], *, name: str) -> None:
        self.name = name
        self._make = make
        self.verbs = frozenset(verb for verb, method in VERBS.items() if hasattr(make, method)) | {"step", "advance"}

    def start(self, shape: EngineShape) -> EngineInfo:
        self._engine: Any = self._make(shape)
        self._live: dict[str, _Client] = {}
        self._mode: Mode | None = None
        self._pending: list[_PauseCall] = []
        self._version = "default"
        self._steps = 0
        return EngineInfo(versions={}, device="none", profile="caesura", eos_token_ids=())

    def tokenize(self, text: str) -> tuple[int, ...]:
        return bytes_of(text)

    def apply(self, op: int, operation: Operation) -> list[ev.Event]:
        events: list[ev.Event] = [ev.Received(op=op)]
        try:
            answer = self._carry_out(op, operation, events)
        except Refused as refused:
            events.append(ev.Returned(op=op, answer=None, error=ev.Failure(refused.code, str(refused))))
        else:
            if answer is not None:
                events.append(ev.Returned(op=op, answer=answer, error=None))
        return [*events, *self._complete_pause()]

    def has_work(self) -> bool:
        return self._engine.has_work()

    def step(self) -> list[ev.Event]:
        self._steps += 1
        tokens = list(self._engine.step())
        events: list[ev.Event] = []
        for request in {token.request: None for token in tokens}:
            client = self._live.get(request)
            if client is not None and not client.admitted:
                client.admitted = True
                events.append(ev.Admitted(request=request, life=1, computed=0))
        batch = tuple(self._share(token) for token in tokens)
        sampled = tuple(ev.Sampled(token.request, token.token) for token in tokens if token.token is not None)
        events += [ev.Launched(step=self._steps, batch=batch), ev.Landed(step=self._steps, sampled=sampled)]
        outputs = [self._output(token) for token in tokens if token.token is not None or token.finish_reason is not None]
        events += [self._finished(token.request, token.finish_reason) for token in tokens if token.finish_reason is not None]
        events += [ev.Delivered(outputs=tuple(outputs))] if outputs else []
        return [*events, *self._complete_pause()]

    def state(self) -> EngineState:
        """What a client knows: who is live, and whether the engine was paused."""
        waiting = tuple(_request_state(id, client) for id, client in self._live.items())
        return EngineState(
            running=(),
            waiting=waiting,
            blocked=(),
            references=(),
            digests=(),
            free=(),
            pause_mode=self._mode,
            pause_pending=bool(self._pending),
            weight_version=self._version,
            update_open=False,
            out_of_service=False,
        )

    def stop(self) -> None:
        self.__dict__.pop("_engine", None)

    def _carry_out(self, op: int, operation: Operation, events: list[ev.Event]) -> dict[str, Any] | None:
        """The answer; None if the call returns later."""
        engine = self._engine
        match operation:
            case Submit():
                prompt = operation.prompt.token_ids or ()
                engine.submit(operation.id, prompt, operation.max_tokens)
                self._live[operation.id] = _Client(len(prompt))
                parked = self._mode is not None
                events.append(ev.Accepted(request=operation.id, parked=parked))
                return {"state": "parked" if parked else "queued"}
            case Abort():
                aborted = list(engine.abort(None if operation.ids == "all" else operation.ids))
                events += self._aborted(aborted)
                return {"aborted": len(aborted)}
            case Pause():
                aborted = list(engine.pause(operation.mode, operation.clear_cache))
                events += self._take_up(_PauseCall(op, operation.mode, operation.clear_cache))
                events += self._aborted(aborted)
                return None
            case Resume():
                engine.resume()
                if self._mode is not None:
                    events += [*map(_superseded, self._pending), ev.Resumed()]
                    self._mode, self._pending = None, []
                return {"status": "resumed"}
            case IsPaused():
                return {"is_paused": engine.is_paused()}
            case SwapWeights():
                seed = operation.source.perturb.seed + 1 if operation.source.perturb is not None else 0
                engine.swap_weights(seed, operation.version or self._version)
                self._version = operation.version or self._version
                events += [ev.UpdateStarted(), ev.PartReceived(part=1, of=1, tensors=0, bytes=0), ev.Committed(version=self._version)]
                return {"status": "finished", "weight_version": self._version}
        raise Refused(f"an engine of this protocol has no {operation.verb}; it knows {', '.join(sorted(self.verbs))}")

    def _take_up(self, call: _PauseCall) -> Iterator[ev.Event]:
        """A pause call comes in; `keep` freezes what a pending `wait` waits for."""
        superseded = [pending for pending in self._pending if pending.mode == "wait" and call.mode == "keep"]
        yield from map(_superseded, superseded)
        self._pending = [pending for pending in self._pending if pending not in superseded] + [call]
        self._mode = call.mode
        yield ev.PausePending(mode=call.mode, clear_cache=self._clears)

    @property
    def _clears(self) -> bool:
        """What all pending calls together ask for."""
        return any(call.clear_cache for call in self._pending)

    def _complete_pause(self) -> Iterator[ev.Event]:
        if self._mode is None or not self._pending or not self._engine.quiet():
            return
        if self._clears:
            yield ev.Cleared(tier="device", success=True, empty=True)
        yield ev.PauseEffective(mode=self._mode, clear_cache=self._clears)
        for call in self._pending:
            yield ev.Returned(op=call.op, answer={"status": "paused"}, error=None)
        self._pending = []

    def _aborted(self, ids: Sequence[str]) -> list[ev.Event]:
        tokens = [Token(id, None, "abort") for id in ids]
        outputs = tuple(self._output(token) for token in tokens)
        finished = [self._finished(id, "abort") for id in ids]
        return [*finished, ev.Delivered(outputs=outputs)] if outputs else []

    def _share(self, token: Token) -> ev.Scheduled:
        """All that was not computed of a request; this much is taken for granted, as the engine does not tell."""
        client = self._live.get(token.request)
        if client is None:
            return ev.Scheduled(token.request, 0, 1)
        known = client.prompt + len(client.output)
        return ev.Scheduled(token.request, client.computed, max(known - client.computed, 1))

    def _output(self, token: Token) -> ev.Output:
        client = self._live.get(token.request) or _Client(0)
        first = len(client.output)
        new = () if token.token is None else (token.token,)
        client.computed = client.prompt + first
        client.output += new
        client.spans.append(self._version) if new else None
        return ev.Output(token.request, first, new, token.finish_reason)

    def _finished(self, id: str, reason: Any) -> ev.Event:
        client = self._live.pop(id, None) or _Client(0)
        return ev.Finished(
            request=id, reason=reason, prompt_tokens=client.prompt, output_tokens=len(client.output), spans=tuple(_spans(client.spans))
        )


class _PauseCall(NamedTuple):
    """A pause call that has not returned."""

    op: int
    mode: Mode
    clear_cache: bool


class _Client:
    """What a client knows of its request."""

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        self.admitted = False
        self.computed = 0
        self.output: list[int] = []
        self.spans: list[str] = []
        """The version resident at each output token."""


def _spans(versions: Sequence[str]) -> Iterator[ev.VersionSpan]:
    start = 0
    for index in range(1, len(versions) + 1):
        if index == len(versions) or versions[index] != versions[start]:
            yield ev.VersionSpan(versions[start], start, index)
            start = index


def _superseded(call: _PauseCall) -> ev.Event:
    return ev.Returned(op=call.op, answer=None, error=ev.Failure("superseded", "a later call overrode this pause"))


def _request_state(id: str, client: _Client) -> RequestState:
    return RequestState(
        id=id,
        status="waiting",
        num_prompt_tokens=client.prompt,
        output=tuple(client.output),
        num_computed_tokens=client.computed,
        num_preemptions=0,
        blocks=(),
        parked=False,
    )


def load_engine(name: str) -> EngineBackend:
    """The engine named `FILE.py:CLASS` or `package.module:CLASS`.

    Raises:
        BackendError: there is no such file, module or class, or it lacks a method of the protocol.
    """
    place, _, class_name = name.rpartition(":")
    module = _load_file(Path(place)) if place.endswith(".py") else _load_module(place)
    make = getattr(module, class_name, None)
    if not isinstance(make, type):
        raise BackendError(f"engine {name}: {place} has no class {class_name!r}; expected FILE.py:CLASS or package.module:CLASS")
    return engine_backend(make, name=name)


def engine_backend(make: Callable[[EngineShape], Engine], *, name: str | None = None) -> EngineBackend:
    """A backend of a class of the protocol.

    Raises:
        BackendError: it lacks a method of the protocol.
    """
    needed = ("submit", "abort", "has_work", "step", "pause", "quiet", "resume")
    if lacks := [method for method in needed if not callable(getattr(make, method, None))]:
        raise BackendError(
            f"{getattr(make, '__name__', make)} is no engine: it lacks {', '.join(lacks)}; docs/your-engine.md has the protocol"
        )
    return EngineBackend(make, name=name or getattr(make, "__name__", "yours"))


def _load_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise BackendError(
            f"engine module {name!r}: no module named {error.name!r}; expected FILE.py:CLASS or package.module:CLASS"
        ) from error


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise BackendError(f"engine file {path} does not exist; expected FILE.py:CLASS")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and pickles of the file look their module up by name.
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module
