"""Engines under test, each behind the same few methods.

A backend in lockstep turns an engine into transactions: the events of one
operation or one step, in the order of docs/semantics.md. A live one runs by
itself; it is called as its clients call it, and records itself if it can. The
harness knows engines only through this package, and loads an engine's libraries
only when it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from harness.errors import BadInput
from harness.events import SCHEMA, Entry, ErrorCode, Event, Opened, Output
from harness.operations import Operation
from harness.scenario import EngineShape
from harness.state import EngineState
from harness.version import version


class BackendError(BadInput):
    """The engine cannot be had: unknown name, library not installed, checkpoint that is not there."""


class CannotRun(BackendError):
    """The scenario asks for something that the engine cannot be asked for."""


class EngineInfo(NamedTuple):
    """What an engine says of itself when it starts."""

    versions: dict[str, str]
    """Version of the engine and of the libraries that its results depend on, by name."""
    device: str
    profile: str
    """Name of the model's profile that describes this engine."""
    eos_token_ids: tuple[int, ...]
    vocab_size: int | None = None
    """Token ids run below this; None for an engine that takes any."""


class Backend(Protocol):
    """One engine, driven in lockstep: nothing happens in it outside these calls.

    One that does not know every operation has an attribute `verbs`, the frozenset of those that it knows: generated cases ask
    it for no others, give it no host tier and send it no bad tensors.
    """

    name: str
    level: int
    """How much it shows: 0 client, 1 schedule, 2 blocks, 3 numbers."""

    def start(self, shape: EngineShape) -> EngineInfo:
        """Bring the engine up. Raises BackendError with a sentence that says what to do."""
        ...

    def tokenize(self, text: str) -> tuple[int, ...]: ...

    def apply(self, op: int, operation: Operation) -> list[Event]:
        """Hand an operation to the core: `received`, what it did, and `returned` of every call that ends by it.

        A refused call is a `returned` with an error, not an exception. Prompts hold token ids.
        """
        ...

    def has_work(self) -> bool: ...

    def step(self) -> list[Event]:
        """One turn of the engine's loop: it launches a step, lands one, or both. Synchronous engines do both. Requires has_work()."""
        ...

    def state(self) -> EngineState: ...

    def stop(self) -> None:
        """Let go of everything; may be called at any time, also twice."""
        ...


@runtime_checkable
class Limited(Protocol):
    """A backend whose engine has not everything that can be asked for."""

    def cannot(self, operation: Operation) -> str | None:
        """Why this engine cannot be asked for the operation, in words after "cannot"; None if it can. Asked once it is started."""
        ...


@runtime_checkable
class Recomputes(Protocol):
    """A backend that can say afterwards what its tokens should have been."""

    def references(self, entries: Sequence[Entry]) -> Sequence[Event]:
        """`reference` events for the tokens of a log, computed without the engine's scheduler and pool."""
        ...


class Answer(NamedTuple):
    """What a live engine answered to a call that succeeded."""

    content: dict[str, Any]
    """As docs/semantics.md has it; that of `submit` is described at events.Answered."""
    status: int | None = None
    """Over HTTP, with what code."""


class CallRefused(Exception):
    """A live engine answered a call with an error.

    Attributes:
        code: what it was refused for, as well as the adapter can tell from outside.
        status: over HTTP, with what code.
    """

    def __init__(self, code: ErrorCode, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.code: ErrorCode = code
        self.status = status


@runtime_checkable
class LiveBackend(Protocol):
    """One engine that runs by itself, beside those who call it. Coroutines are awaited in one event loop, `call` many at a time.

    A run is `start`, calls, `end`. Another may follow: with the same shape a backend may go on with the engine that it has,
    provided that nothing of the run before can be seen in the next.
    """

    name: str
    level: int
    """How much its own log shows: 0 client (it writes none), 1 schedule, 2 blocks, 3 numbers."""

    async def start(self, shape: EngineShape, folder: Path) -> EngineInfo:
        """Bring the engine up. From level 1 on it records itself, from inside its loop: each transaction is appended to
        `folder`/events.r<rank>.jsonl as soon as it has happened, beginning with `opened`, whose `clock_base_ns` is what `t_ns`
        adds up to CLOCK_MONOTONIC with. When this returns, the `opened` of every rank is there.

        Raises:
            BackendError: with a sentence that says what to do.
        """
        ...

    def tokenize(self, text: str) -> tuple[int, ...]: ...

    def cannot(self, operation: Operation) -> str | None:
        """Why this engine cannot be asked for the operation, in words after "cannot"; None if it can. Asked once it is started."""
        ...

    async def call(self, operation: Operation, heard: Callable[[Sequence[Output]], None]) -> Answer:
        """Make a call as a client does, until it comes back: for `submit`, until the request ended.

        Args:
            operation: prompts hold token ids; never one of DRIVER_VERBS.
            heard: to be told of a request's outputs as they reach the client, in order, before this returns. An aborted
                request's last output has no tokens.

        Raises:
            CallRefused: the engine answered with an error.
            asyncio.CancelledError: the client hung up; an engine that notices aborts the request.
            Exception: anything else: the engine is dead or broke its protocol, and the run ends as `crashed`.
        """
        ...

    async def end(self, why: str) -> None:
        """The run is over: end every rank's log with `closed` (`why` as events.Closed says) if one is written; the engine may be dead."""
        ...

    async def stop(self) -> None:
        """Let go of everything; may be called at any time, also twice."""
        ...


@runtime_checkable
class Prepares(Protocol):
    """A live backend that gets things ready before a run."""

    def prepare(self, operation: Operation) -> None:
        """The operation will be asked for: make what it needs and takes time to make, as new weights do."""
        ...


def opened_event(
    shape: EngineShape, backend: Backend | LiveBackend, info: EngineInfo, *, digest: str, seed: int, clock_base_ns: int = 0
) -> Opened:
    """The first event of a lockstep log, or of a live one that shows all that the engine shows."""
    return Opened(
        schema=SCHEMA,
        caesura=version(),
        backend=backend.name,
        versions=info.versions,
        level=backend.level,
        device=info.device,
        engine=shape.model_dump(mode="json"),
        profile=info.profile,
        eos_token_ids=info.eos_token_ids,
        scenario=digest,
        seed=seed,
        clock_base_ns=clock_base_ns,
        rank=0,
    )


ENGINES = ("sim", "torch", "vllm", "vllm-scheduler")
LIVE_ENGINES = ("torch-live", "torch-live-inproc", "vllm-live")


def make_backend(name: str, *, seed: int = 0) -> Backend:
    """The backend of that name, not started yet.

    Raises:
        BackendError: the name is unknown, or the engine's libraries are not installed.
    """
    if name == "sim":
        from harness.backends.sim import SimBackend

        return SimBackend(seed=seed)
    if name == "torch":
        try:
            from harness.backends.torch import TorchBackend
        except ModuleNotFoundError as error:
            raise BackendError(f"engine `torch` needs the package {error.name}: install caesura-rl with the extra 'engine'") from error
        return TorchBackend()
    if name in ("vllm", "vllm-scheduler"):
        from harness.backends.vllm.install import load

        return load(name, seed=seed)
    if ":" in name:
        from harness.backends.yours import load_engine

        return load_engine(name)
    known = ", ".join((*ENGINES, *LIVE_ENGINES))
    raise BackendError(f"unknown engine {name!r}: expected one of {known}, a server's URL, or FILE.py:CLASS of your own")


def is_live(name: str) -> bool:
    """Whether the engine of that name runs by itself; one that is named by a URL does."""
    return name in LIVE_ENGINES or _is_url(name)


def make_live_backend(name: str) -> LiveBackend:
    """The live backend of that name, for which `is_live` is true, not started yet.

    Raises:
        BackendError: the engine's libraries are not installed.
    """
    if _is_url(name):
        try:
            from harness.backends.http import HttpBackend
        except ModuleNotFoundError as error:
            raise BackendError(f"a server needs the package {error.name}: install caesura-rl with the extra 'check'") from error
        return HttpBackend(name, key=os.environ.get("CAESURA_API_KEY"))
    if name == "vllm-live":
        from harness.backends.vllm.install import load_live

        return load_live()
    try:
        from harness.backends.torch_live import TorchLive
    except ModuleNotFoundError as error:
        raise BackendError(f"engine `{name}` needs the package {error.name}: install caesura-rl with the extra 'engine'") from error
    return TorchLive(in_process=name == "torch-live-inproc")


def _is_url(name: str) -> bool:
    return name.startswith(("http://", "https://"))


def make_any_backend(name: str) -> Backend | LiveBackend:
    """The backend of that name, of whichever kind, not started yet. Raises: as its kind."""
    return make_live_backend(name) if is_live(name) else make_backend(name)
