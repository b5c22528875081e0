"""What AsyncLLM and the loop of the core say to each other: calls one way, reports the other.

Data only, of types that are named here: msgspec carries it between processes, and whatever does not
have these types is refused. Tensors travel beside a message, as raw buffers in the order of its specs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from . import errors
from .config import SamplingParams
from .errors import EngineError, InvalidArgument, UpdateFailed
from .outputs import EngineCoreOutput

Tokens = tuple[int, ...]


def _verb(name: str) -> str:
    """`StartWeightUpdate` is called `start_weight_update`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Call(msgspec.Struct, frozen=True, kw_only=True, tag_field="verb", tag=_verb):
    """Something asked of the core. It answers each call once, as docs/semantics.md lists answers, unless it dies."""

    call: int
    """Number of the call, chosen by the caller."""
    note: str = ""
    """For the observer alone."""

    @property
    def verb(self) -> str:
        return str(self.__struct_config__.tag)

    @property
    def arguments(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__struct_fields__ if name not in ("call", "note")}


class Submit(Call, frozen=True, kw_only=True):
    request_id: str
    prompt_token_ids: Tokens
    params: SamplingParams


class Abort(Call, frozen=True, kw_only=True):
    request_ids: tuple[str, ...] | None
    """None: all."""


class Pause(Call, frozen=True, kw_only=True):
    """Answered when the engine is quiet. The core says which modes there are."""

    mode: str
    clear_cache: bool


class Resume(Call, frozen=True, kw_only=True): ...


class IsPaused(Call, frozen=True, kw_only=True): ...


class Sleep(Call, frozen=True, kw_only=True):
    level: int
    mode: str | None


class WakeUp(Call, frozen=True, kw_only=True):
    tags: tuple[str, ...] | None


class IsSleeping(Call, frozen=True, kw_only=True): ...


class ResetPrefixCache(Call, frozen=True, kw_only=True): ...


class StartWeightUpdate(Call, frozen=True, kw_only=True):
    allow_unpaused: bool


class TensorSpec(NamedTuple):
    """What a buffer beside the message holds, row by row."""

    name: str
    dtype: str
    """As torch calls it, without `torch.`."""
    shape: tuple[int, ...]


class UpdateWeights(Call, frozen=True, kw_only=True):
    """New weights: those of a folder of safetensors, or (None) the tensors that travel beside the message."""

    folder: str | None
    tensors: tuple[TensorSpec, ...] = ()
    part: int | None
    of: int | None
    """How many parts this session sends, counted from 1; None: nobody said."""


class FinishWeightUpdate(Call, frozen=True, kw_only=True):
    version: str | None


class LoadWeights(Call, frozen=True, kw_only=True):
    """The whole session in one."""

    folder: str | None
    tensors: tuple[TensorSpec, ...] = ()
    version: str | None


class UpdateWeightVersion(Call, frozen=True, kw_only=True):
    version: str
    allow_unpaused: bool


class GetWeightVersion(Call, frozen=True, kw_only=True): ...


class WeightChecksums(Call, frozen=True, kw_only=True): ...


class GetCounters(Call, frozen=True, kw_only=True): ...


class Shutdown(Call, frozen=True, kw_only=True):
    """End what is live, at the latest in so many seconds, and stop. `Stopped` is its answer."""

    drain_s: float
    why: str


AnyCall = (
    Submit
    | Abort
    | Pause
    | Resume
    | IsPaused
    | Sleep
    | WakeUp
    | IsSleeping
    | ResetPrefixCache
    | StartWeightUpdate
    | UpdateWeights
    | FinishWeightUpdate
    | LoadWeights
    | UpdateWeightVersion
    | GetWeightVersion
    | WeightChecksums
    | GetCounters
    | Shutdown
)


def make_call(kind: type[Call], arguments: Mapping[str, Any]) -> Call:
    """A call whose arguments have the types that they should have.

    Raises:
        InvalidArgument: one has not.
    """
    try:
        return msgspec.convert(arguments, kind)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"{_verb(kind.__name__)}: {error}") from None


class EngineCounters(msgspec.Struct, frozen=True, kw_only=True):
    """Where the engine stands, at one boundary of its steps; counts that only grow begin with the engine."""

    running: int
    waiting: int
    """Accepted and not running, the parked ones among them."""
    parked: int
    blocked: int
    """Held in front of the core by the late-request policy `block`."""
    free_blocks: int
    num_blocks: int
    prompt_tokens: int
    """Of all accepted requests."""
    generated_tokens: int
    prefix_cache_queries: int
    """Tokens of requests when first admitted, looked up in the prefix cache."""
    prefix_cache_hits: int
    """Those of them that were found, in whichever tier."""
    preemptions: int
    pause_mode: str | None
    """None: running."""
    pause_pending: bool
    sleeping: bool
    update_open: bool
    out_of_service: str | None
    """Why nothing may be sampled; None: in service."""
    weight_version: str


class Report(msgspec.Struct, frozen=True, kw_only=True, tag_field="report", tag=_verb):
    """Something that the core says, in the order in which it happened."""


class Ready(Report, frozen=True, kw_only=True):
    """The first report of an engine that stands."""

    eos_token_ids: Tokens
    vocab_size: int


class Outputs(Report, frozen=True, kw_only=True):
    outputs: tuple[EngineCoreOutput, ...]


class Answer(Report, frozen=True, kw_only=True):
    call: int
    answer: dict[str, Any]


class Refusal(Report, frozen=True, kw_only=True):
    call: int
    error: str
    """Name of a class of `engine.errors`."""
    message: str
    wrote: bool = False

    @classmethod
    def of(cls, call: int, error: EngineError) -> Refusal:
        return cls(call=call, error=type(error).__name__, message=str(error), wrote=getattr(error, "wrote", False))

    def exception(self) -> EngineError:
        kind = getattr(errors, self.error)
        return kind(self.message, wrote=self.wrote) if kind is UpdateFailed else kind(self.message)


class Stopped(Report, frozen=True, kw_only=True):
    """The last report, of an engine that never stood too."""

    why: str
    invalid: bool = False
    """It never stood because of what it was made from."""


AnyReport = Ready | Outputs | Answer | Refusal | Stopped
