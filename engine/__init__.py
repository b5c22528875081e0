"""Caesura's own inference engine: small, and built so that it may be paused mid-tokens and given new weights.

`EngineCore` is the engine; `Observer` is how to watch it. Nothing here knows of the test harness.
"""

from __future__ import annotations

from .config import EngineConfig, SamplingParams
from .core import EngineCore
from .errors import (
    CacheBusy,
    Conflict,
    EngineError,
    ForwardFailed,
    InvalidArgument,
    NotFinite,
    OutOfService,
    PauseSuperseded,
    RequestRejected,
    UpdateFailed,
)
from .observer import Observer
from .outputs import PauseTicket, RequestOutput, TokenLogprobs, VersionSpan
from .weights import WeightTarget, named_weights, read_safetensors

__all__ = [
    "CacheBusy",
    "Conflict",
    "EngineConfig",
    "EngineCore",
    "EngineError",
    "ForwardFailed",
    "InvalidArgument",
    "NotFinite",
    "Observer",
    "OutOfService",
    "PauseSuperseded",
    "PauseTicket",
    "RequestOutput",
    "RequestRejected",
    "SamplingParams",
    "TokenLogprobs",
    "UpdateFailed",
    "VersionSpan",
    "WeightTarget",
    "named_weights",
    "read_safetensors",
]
