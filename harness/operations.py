"""What can be asked of an engine: each operation is frozen data.

A scenario's timeline, a fuzzer's case and a replay are the same list of
operations. An operation names what it refers to by handle (``r1``), never by
index, so that a shrunk list keeps its meaning. As data, an operation is a
mapping with one key, its verb: ``{"submit": {"id": "r1", ...}}``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from harness.events import Mode, Tag

Handle = Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[A-Za-z0-9_.:-]+$")]
Milliseconds = Annotated[float, Field(gt=0, le=86_400_000)]

PROMPT_VOCABULARY = range(16, 256)
"""Token ids that generated prompts draw from; every checkpoint of 256 tokens or more has them."""

SHORT_RUN = 256
"""Pseudo-random runs of at most so many tokens are remembered: fuzzing asks for the same few over and over."""


class Data(BaseModel):
    """Frozen, keyword-only, no unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class TokenRun(Data):
    """A number of pseudo-random tokens; runs of one seed share their beginning."""

    tokens: int = Field(ge=1, le=1_000_000)
    seed: int = Field(default=0, ge=0)

    def resolve(self) -> tuple[int, ...]:
        return _run(self.seed, self.tokens)


class Prompt(Data):
    """A prompt as text, as token ids, or as a number of pseudo-random tokens.

    ``prefix`` puts a shared run in front of generated tokens. Once an engine has tokenised a
    text, ``tokens`` holds the ids and ``text`` remains for readers.
    """

    text: str | None = None
    tokens: int | tuple[Annotated[int, Field(ge=0)], ...] | None = Field(default=None, union_mode="left_to_right")
    seed: int = Field(default=0, ge=0)
    prefix: TokenRun | None = None

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("tokens"), list):
            return {**value, "tokens": tuple(value["tokens"])}
        return value

    @model_validator(mode="after")
    def _one_form(self) -> Prompt:
        if self.text is None and self.tokens is None:
            raise ValueError("a prompt needs `text` or `tokens`")
        if self.text is not None and isinstance(self.tokens, int):
            raise ValueError("a prompt has `text` or a number of `tokens`, not both")
        if isinstance(self.tokens, int) and not 1 <= self.tokens <= 1_000_000:
            raise ValueError(f"a prompt needs 1 to 1000000 tokens, got {self.tokens}")
        if self.prefix is not None and not isinstance(self.tokens, int):
            raise ValueError("`prefix` goes with a number of `tokens`")
        return self

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        """The token ids, or None for a text that no tokenizer has seen yet."""
        if not isinstance(self.tokens, int):
            return self.tokens
        head = self.prefix.resolve() if self.prefix else ()
        return head + _run(self.seed, self.tokens)


def _run(seed: int, tokens: int) -> tuple[int, ...]:
    return (_short_run if tokens <= SHORT_RUN else _any_run)(seed, tokens)


def _any_run(seed: int, tokens: int) -> tuple[int, ...]:
    return tuple(_token(seed, position) for position in range(tokens))


_short_run = lru_cache(maxsize=4096)(_any_run)


def _token(seed: int, position: int) -> int:
    """splitmix64 (Steele et al., OOPSLA 2014) of seed and position, folded into PROMPT_VOCABULARY."""
    mask = (1 << 64) - 1
    z = (seed * 0x9E3779B97F4A7C15 + (position + 1) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return PROMPT_VOCABULARY[(z ^ (z >> 31)) % len(PROMPT_VOCABULARY)]


class Perturbation(Data):
    """Seeded noise on the original weights: w + scale * std(w) * N(0, 1), tensor by tensor."""

    seed: int = Field(ge=0)
    scale: float = Field(gt=0, allow_inf_nan=False)


class Spoil(Data):
    """What is wrong with one of the tensors that a part sends: its name matches nothing, its shape is another, or one of its
    values is no number or infinite. `tensor` counts those of the part from 0."""

    tensor: int = Field(default=0, ge=0)
    how: Literal["name", "shape", "nan", "infinity"]


class WeightSource(Data):
    """Where new weights come from: one of `original`, `perturb` and `checkpoint`. `spoil`: one of its tensors is bad."""

    original: Literal[True] | None = None
    perturb: Perturbation | None = None
    checkpoint: str | None = Field(default=None, min_length=1)
    spoil: Spoil | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> WeightSource:
        if sum(value is not None for value in (self.original, self.perturb, self.checkpoint)) != 1:
            raise ValueError("a weight source is exactly one of `original: true`, `perturb: {seed, scale}`, `checkpoint: PATH`")
        return self


class Operation(Data):
    """One thing asked of the engine (or, for `step` and `advance`, of the lockstep driver)."""

    verb: ClassVar[str]


class Submit(Operation):
    """Hand in a request. It ends at max_tokens, max_model_len or an end-of-sequence token.

    Decoding is greedy at temperature 0. Otherwise a token is drawn, after temperature, min_p, top_k (0: no limit) and top_p,
    by random numbers that are a function of `seed` (without one, of the id) and the token's position alone.
    `logprobs`: report each token's log probability and those of so many best ones.
    """

    verb: ClassVar[str] = "submit"
    id: Handle
    prompt: Prompt
    max_tokens: int = 16
    cache_salt: str | None = Field(default=None, min_length=1)
    ignore_eos: bool = False
    temperature: float = Field(default=0.0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, allow_inf_nan=False)
    top_k: int = 0
    min_p: float = Field(default=0.0, allow_inf_nan=False)
    seed: int | None = None
    logprobs: int | None = None


class Abort(Operation):
    """Abort requests by id, in the order given, or all in the order of their arrival."""

    verb: ClassVar[str] = "abort"
    ids: tuple[Handle, ...] | Literal["all"]

    @model_validator(mode="before")
    @classmethod
    def _lists_are_tuples(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(value.get("ids"), list):
            return {**value, "ids": tuple(value["ids"])}
        return value


class Step(Operation):
    """Lockstep only: make one step now, if the engine has work."""

    verb: ClassVar[str] = "step"


class Advance(Operation):
    """Lockstep only: make several steps, or let virtual time pass (stepping while there is work)."""

    verb: ClassVar[str] = "advance"
    steps: int | None = Field(default=None, ge=1)
    ms: Milliseconds | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> Advance:
        if (self.steps is None) == (self.ms is None):
            raise ValueError("advance needs exactly one of `steps` and `ms`")
        return self


class Pause(Operation):
    """Pause generation. The call returns when the engine is quiet."""

    verb: ClassVar[str] = "pause"
    mode: Mode = "abort"
    clear_cache: bool = True


class Resume(Operation):
    verb: ClassVar[str] = "resume"


class IsPaused(Operation):
    verb: ClassVar[str] = "is_paused"


class ResetPrefixCache(Operation):
    verb: ClassVar[str] = "reset_prefix_cache"


Level = Literal[0, 1, 2]
"""How deep a sleep is."""


class Sleep(Operation):
    """Pause, then give memory back: level 0 none, 1 moves the weights to the host and drops the KV, 2 drops both.

    Without `mode` a pause that is in force stays as it is, and a running engine is paused by `abort`.
    """

    verb: ClassVar[str] = "sleep"
    level: Level = 1
    mode: Mode | None = None


class WakeUp(Operation):
    """Map memory again: that of these tags, or all of it."""

    verb: ClassVar[str] = "wake_up"
    tags: tuple[Tag, ...] | None = Field(default=None, strict=False)


class IsSleeping(Operation):
    verb: ClassVar[str] = "is_sleeping"


class StartWeightUpdate(Operation):
    verb: ClassVar[str] = "start_weight_update"
    allow_unpaused: bool = False
    fails: bool = False


class UpdateWeights(Operation):
    """Send part `part` of `of` of the source's tensors. `fails`: the source breaks after the part's first tensor."""

    verb: ClassVar[str] = "update_weights"
    source: WeightSource
    part: int = Field(default=1, ge=1)
    of: int = Field(default=1, ge=1, le=16)
    fails: bool = False

    @model_validator(mode="after")
    def _part_exists(self) -> UpdateWeights:
        if self.part > self.of:
            raise ValueError(f"part {self.part} of {self.of} does not exist")
        return self


class FinishWeightUpdate(Operation):
    verb: ClassVar[str] = "finish_weight_update"
    version: str | None = Field(default=None, min_length=1)
    fails: bool = False


class SwapWeights(Operation):
    """The whole session in one: start, one part, finish. `fails`: the source breaks after its first tensor."""

    verb: ClassVar[str] = "swap_weights"
    source: WeightSource
    version: str | None = Field(default=None, min_length=1)
    fails: bool = False


class UpdateWeightVersion(Operation):
    """Set the label without touching weights."""

    verb: ClassVar[str] = "update_weight_version"
    version: str = Field(min_length=1)
    allow_unpaused: bool = False


DRIVER_VERBS = (Step, Advance)
"""Operations that the lockstep driver carries out; no engine sees them."""

OPERATIONS: dict[str, type[Operation]] = {
    kind.verb: kind
    for kind in (
        Submit,
        Abort,
        Step,
        Advance,
        Pause,
        Resume,
        IsPaused,
        ResetPrefixCache,
        Sleep,
        WakeUp,
        IsSleeping,
        StartWeightUpdate,
        UpdateWeights,
        FinishWeightUpdate,
        SwapWeights,
        UpdateWeightVersion,
    )
}
"""Every operation by its verb."""


def to_data(operation: Operation) -> dict[str, Any]:
    """The operation as plain data, without fields that have their default value."""
    return {operation.verb: operation.model_dump(mode="json", exclude_defaults=True)}


def from_data(data: dict[str, Any]) -> Operation:
    """The inverse of `to_data`.

    Raises:
        ValueError: not a mapping of one known verb to valid fields (pydantic's ValidationError is one).
    """
    if len(data) != 1 or (verb := next(iter(data))) not in OPERATIONS:
        raise ValueError(f"expected one operation of {', '.join(OPERATIONS)}, got {sorted(data)}")
    return OPERATIONS[verb].model_validate(data[verb])


def in_words(operation: Operation) -> str:
    """The operation for a line of a timeline: its verb and what tells it from others, prompts left out."""
    fields = {name: value for name, value in to_data(operation)[operation.verb].items() if name != "prompt"}
    return " ".join([operation.verb, *(str(value) if name == "id" else f"{name}={_flat(value)}" for name, value in fields.items())])


def _flat(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}:{_flat(inner)}" for name, inner in value.items())
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
