"""What a dialect is: how one family of servers spells the operations, and what its answers mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, NoReturn, get_args

from harness.backends import Answer, CallRefused
from harness.backends.http.client import BrokenProtocol, Client, Reply
from harness.events import ErrorCode, FinishReason
from harness.operations import (
    Abort,
    FinishWeightUpdate,
    IsPaused,
    IsSleeping,
    Operation,
    Pause,
    ResetPrefixCache,
    Resume,
    Sleep,
    StartWeightUpdate,
    Submit,
    SwapWeights,
    UpdateWeights,
    UpdateWeightVersion,
    WakeUp,
    WeightSource,
)

CODES: Mapping[Any, ErrorCode] = {code: code for code in get_args(ErrorCode)}
CODE_OF_STATUS: Mapping[int, ErrorCode] = {400: "invalid", 422: "invalid", 413: "invalid", 409: "conflict", 503: "rejected"}
"""What a status most likely stands for, where the body does not say; anything else has failed."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What a server says of itself."""

    model: str
    """The served model's name."""
    root: str
    """Its checkpoint, as the server knows it: a folder on its machine, or a hub's name."""
    max_model_len: int
    versions: dict[str, str]
    """Version of the engine, by its name."""
    paths: frozenset[str]
    """Those of the optional paths that it has."""


class Chunk(NamedTuple):
    """What one event of a stream tells about its one choice."""

    tokens: tuple[int, ...]
    """Generated since the event before."""
    finish_reason: FinishReason | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    """As the server counts them."""
    cached_tokens: int | None = None
    """Of the prompt, those that it found in its prefix cache."""
    spans: tuple[tuple[str, int, int], ...] | None = None
    """Weight versions as (label, start, end) over the output, in an event that has them."""

    def over(self, earlier: Chunk) -> Chunk:
        """This one, with what it does not tell taken from an earlier one."""
        return Chunk(
            self.tokens,
            self.finish_reason or earlier.finish_reason,
            earlier.prompt_tokens if self.prompt_tokens is None else self.prompt_tokens,
            earlier.output_tokens if self.output_tokens is None else self.output_tokens,
            earlier.cached_tokens if self.cached_tokens is None else self.cached_tokens,
            earlier.spans if self.spans is None else self.spans,
        )


class Generation(NamedTuple):
    """The call that starts a stream of one request."""

    path: str
    body: dict[str, Any]
    headers: dict[str, str]


class Dialect(ABC):
    """Speaks one family's HTTP: a method for each operation, named after its verb. Each raises CallRefused, Unreachable, NoAnswer."""

    name: ClassVar[str]
    switch: ClassVar[str]
    """How to start the server so that it has the control plane, as a sentence's end."""
    optional_paths: ClassVar[tuple[str, ...]] = ()
    """Looked for when the server is first met; which are there is in `card.paths`."""

    def __init__(self, client: Client, card: Card) -> None:
        self.client = client
        self.card = card

    def cannot(self, operation: Operation) -> str | None:
        """Why this server cannot be asked for it, in words after "cannot"; None if it can."""
        return None if hasattr(self, operation.verb) else f"be asked for {operation.verb} over HTTP"

    async def call(self, operation: Operation) -> Answer:
        """Any operation but submit."""
        return await getattr(self, operation.verb)(operation)

    @abstractmethod
    def submit(self, operation: Submit) -> Generation: ...

    @abstractmethod
    def read(self, event: Any, received: int) -> Chunk:
        """An event of the stream, of which `received` tokens came before. Raises CallRefused for one that is an error, BrokenProtocol."""
        ...

    @abstractmethod
    async def pause(self, operation: Pause) -> Answer: ...

    @abstractmethod
    async def resume(self, operation: Resume) -> Answer: ...

    @abstractmethod
    async def is_paused(self, operation: IsPaused) -> Answer: ...

    @abstractmethod
    async def abort(self, operation: Abort) -> Answer: ...

    @abstractmethod
    async def reset_prefix_cache(self, operation: ResetPrefixCache) -> Answer: ...

    @abstractmethod
    async def update_weight_version(self, operation: UpdateWeightVersion) -> Answer: ...

    @abstractmethod
    async def swap_weights(self, operation: SwapWeights) -> Answer: ...

    @abstractmethod
    async def weight_version(self) -> str | None:
        """The label in force; None if this server has none."""
        ...

    async def learn(self) -> None:  # noqa: B027
        """Ask what only calls can tell, once, before the first operation."""

    def has(self, path: str) -> bool:
        """Whether an optional path is there."""
        return path in self.card.paths

    def folder_of(self, source: WeightSource) -> str:
        """Where the server finds these weights: on its own machine, so nothing is looked up here."""
        return source.checkpoint if source.checkpoint is not None else self.card.root

    def cannot_send(self, operation: UpdateWeights | SwapWeights) -> str | None:
        """Why weights cannot come from there."""
        if operation.source.perturb is not None:
            return "be given perturbed weights over HTTP: it reads checkpoints from folders of its own machine"
        if operation.fails:
            return "be told to fail over HTTP"
        return "be sent a checkpoint in parts over HTTP" if isinstance(operation, UpdateWeights) and operation.of > 1 else None


def accepted(reply: Reply) -> Reply:
    """The reply, if it is no error. Raises CallRefused."""
    if not reply.ok:
        refuse(reply)
    return reply


def refuse(reply: Reply) -> NoReturn:
    """Raises CallRefused with the code that the body names, else that which the status most likely stands for."""
    error = reply.get("error")
    named = error.get("type") if isinstance(error, dict) else None
    code = CODES.get(named) or CODE_OF_STATUS.get(reply.status, "failed")
    raise CallRefused(code, str(reply), status=reply.status)


def finish_reason(text: str | None) -> FinishReason | None:
    """A server's word for why a request ended: those that there are more of (repetition, a stop string) all mean that it stopped."""
    if text in (None, "length", "abort"):
        return text
    if text == "error":
        raise BrokenProtocol("a request ended with finish_reason 'error'")
    return "stop"


SESSION_OPERATIONS = (StartWeightUpdate, UpdateWeights, FinishWeightUpdate)
SLEEP_OPERATIONS = (Sleep, WakeUp, IsSleeping)
