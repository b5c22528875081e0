"""What the control plane takes and answers: the paths and fields of vLLM's RL server, in types."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..outputs import PauseMode
from .schemas import Body

Label = Annotated[str, Field(min_length=1, max_length=256)]
"""A weight version."""


class Query(BaseModel):
    """Query parameters; a misspelt one is refused, as the default mode of a pause aborts every request."""

    model_config = ConfigDict(extra="forbid")


class PauseQuery(Query):
    mode: PauseMode = "abort"
    """`abort` ends every request now, `wait` runs those accepted so far to their end, `keep` freezes them."""
    clear_cache: bool = True
    """Forget all KV; frozen requests are prefilled again after resume."""


class SleepQuery(Query):
    level: Annotated[int, Field(ge=0, le=2)] = 1
    """0 pauses, 1 moves the weights to the host and drops the KV, 2 drops both."""
    mode: PauseMode | None = None
    """None: a pause in force stays as it is; a running engine is paused by `abort`."""


class WakeQuery(Query):
    tags: list[Literal["kv_cache", "weights"]] = []
    """None: everything."""


class UnpausedQuery(Query):
    allow_unpaused: bool = False
    """Do it beside running requests, whose outputs then have more than one version."""


class WorldSizeQuery(Query):
    include_dp: bool = True


class NoQuery(Query):
    pass


class NoBody(Body):
    pass


class AbortBody(Body):
    request_ids: Annotated[list[str], Field(min_length=1, max_length=65536)] | None = None
    """As in `cmpl-<X-Request-Id>-<prompt index>`; None: every request. Ids that are not live are ignored."""


class InitInfo(Body):
    backend: Literal["safetensors"] = "safetensors"


class InitBody(Body):
    init_info: InitInfo


class UpdateInfo(Body):
    """Where new weights lie."""

    path: Annotated[str, Field(min_length=1, max_length=4096)]
    """A folder on the server's machine with model.safetensors, or an index of shards."""
    part: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    of: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Which of how many parts this folder is; a session whose parts are counted is finished only when all were sent."""

    @model_validator(mode="before")
    @classmethod
    def _no_pickles(cls, sent: object) -> object:
        if isinstance(sent, dict) and "ipc_handles_pickled" in sent:
            raise ValueError("ipc_handles_pickled is a pickle, and reading one runs the sender's code; send path, a folder of safetensors")
        return sent


class UpdateBody(Body):
    update_info: UpdateInfo


class FinishBody(Body):
    weight_version: Label | None = None
    """None keeps the label."""


class VersionBody(Body):
    new_version: Label


class CheckBody(Body):
    action: Literal["checksum", "reset", "compare"]
    """`reset` overwrites the weights, so that a transfer that does nothing shows; the engine is out of service until a full update."""
    baseline: dict[str, str] | None = None
    """For `compare`: what `checksum` answered elsewhere or earlier."""

    @model_validator(mode="after")
    def _compare_needs_a_baseline(self) -> CheckBody:
        if (self.action == "compare") != (self.baseline is not None):
            raise ValueError("expected baseline with action='compare', and with no other")
        return self


class Paused(BaseModel):
    status: Literal["paused"] = "paused"


class Resumed(BaseModel):
    status: Literal["resumed"] = "resumed"


class IsPaused(BaseModel):
    is_paused: bool
    """True from the moment that a pause is taken up: no proof that the engine is quiet."""


class Aborted(BaseModel):
    status: Literal["aborted"] = "aborted"
    aborted: int
    """How many sequences ended by this call; a request has `n` of them."""


class Done(BaseModel):
    message: str


class VersionSet(BaseModel):
    success: Literal[True] = True
    new_version: str


class WeightInfo(BaseModel):
    weight_version: str


class Checksums(BaseModel):
    checksums: dict[str, str]


class Compared(BaseModel):
    match: bool
    mismatches: list[str]
    """Names whose checksums differ, or that one side lacks."""


class Reset(BaseModel):
    status: Literal["reset"] = "reset"


class WorldSize(BaseModel):
    world_size: int


class SleepState(BaseModel):
    status: Literal["sleeping", "awake"]


class IsSleeping(BaseModel):
    is_sleeping: bool


class CacheReset(BaseModel):
    success: Literal[True] = True
    """A reset that could not empty every tier is an error instead (409)."""
