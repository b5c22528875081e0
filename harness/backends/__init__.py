"""Engines under test, each behind the same few methods.

A backend turns an engine into transactions: the events of one operation or one
step, in the order of docs/semantics.md. The harness knows engines only through
this package, and loads an engine's libraries only when it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from harness.errors import BadInput
from harness.events import Entry, Event
from harness.operations import Operation
from harness.scenario import EngineShape
from harness.state import EngineState


class BackendError(BadInput):
    """The engine cannot be had: unknown name, library not installed, checkpoint that is not there."""


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
    """One engine, driven in lockstep: nothing happens in it outside these calls."""

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
class Recomputes(Protocol):
    """A backend that can say afterwards what its tokens should have been."""

    def references(self, entries: Sequence[Entry]) -> Sequence[Event]:
        """`reference` events for the tokens of a log, computed without the engine's scheduler and pool."""
        ...


ENGINES = ("sim", "torch", "vllm", "vllm-scheduler")


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
    raise BackendError(f"unknown engine {name!r}: expected one of {', '.join(ENGINES)}, or FILE.py:CLASS of your own")
