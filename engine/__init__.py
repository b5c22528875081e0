"""Caesura's own inference engine: small, and built so that it may be paused mid-tokens and given new weights.

`AsyncLLM` is the engine that runs by itself, `EngineCore` the one that is stepped; `Observer` is how to
watch either. Nothing here knows of the test harness.
"""

from __future__ import annotations

from .async_llm import CALL_NOTE, AsyncLLM
from .completion import CompletionOutput, RequestOutput
from .config import EngineConfig, SamplingParams
from .connection import ObserverFactory
from .core import EngineCore
from .errors import (
    CacheBusy,
    Conflict,
    EngineDeadError,
    EngineError,
    ForwardFailed,
    InvalidArgument,
    NotFinite,
    OutOfService,
    PauseSuperseded,
    RequestRejected,
    UpdateFailed,
)
from .messages import EngineCounters
from .observer import Observer
from .outputs import EngineCoreOutput, PauseTicket, TokenLogprobs, VersionSpan
from .weights import WeightTarget, named_weights, read_safetensors

__all__ = [
    "CALL_NOTE",
    "AsyncLLM",
    "CacheBusy",
    "CompletionOutput",
    "Conflict",
    "EngineConfig",
    "EngineCore",
    "EngineCoreOutput",
    "EngineCounters",
    "EngineDeadError",
    "EngineError",
    "ForwardFailed",
    "InvalidArgument",
    "NotFinite",
    "Observer",
    "ObserverFactory",
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
