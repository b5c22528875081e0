"""What an engine refuses, and why: one class per code, so that a server can map codes without reading messages.

The codes are those of docs/semantics.md. A refused call has changed nothing,
except `UpdateFailed` after the first weight byte.
"""

from __future__ import annotations

from typing import ClassVar


class EngineError(Exception):
    """Base of everything that an engine raises on purpose."""

    code: ClassVar[str]


class InvalidArgument(EngineError, ValueError):
    """An argument that is wrong in every state of the engine."""

    code = "invalid"


class Conflict(EngineError):
    """A call that the engine's present state does not allow."""

    code = "conflict"


class CacheBusy(EngineError):
    """A cache reset while requests hold blocks and no pause is effective."""

    code = "busy"


class UpdateFailed(EngineError):
    """A phase of a weight session broke; `wrote`: after the first byte, so the engine is out of service."""

    code = "failed"

    def __init__(self, message: str, *, wrote: bool) -> None:
        super().__init__(message)
        self.wrote = wrote


class ForwardFailed(EngineError):
    """An earlier forward pass raised: digests name KV that may never have been written, so no step may follow."""

    code = "failed"


class NotFinite(ForwardFailed):
    """Logits hold NaN or infinity, so that no token can be chosen by them."""


class MemoryAsleep(ForwardFailed):
    """A forward pass over memory that was given back: it did not run, and nothing was touched."""


class PauseSuperseded(EngineError):
    """A later call overrode this pause before it took effect."""

    code = "superseded"


class RequestRejected(EngineError):
    """The late-request policy `reject`: the engine is paused or out of service."""

    code = "rejected"


class OutOfService(EngineError):
    """An earlier weight update failed half-way: nothing may be sampled until a full update succeeds."""

    code = "out-of-service"


class EngineDeadError(EngineError):
    """The engine has stopped, was killed, or broke: nothing that was asked of it will happen any more."""

    code = "dead"
