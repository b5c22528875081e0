"""What clients send and get: OpenAI's completions with vLLM's additions.

Fields that would change the answer and that this engine does not have are taken only
with the value that changes nothing: a parameter that is dropped in silence is a wrong answer.
Types are strict, unknown fields are errors.
"""

from __future__ import annotations

import json
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..config import SamplingParams

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Zero = Annotated[float, Field(ge=0, le=0)]
One = Annotated[float, Field(ge=1, le=1)]

MAX_PROMPTS = 256
MAX_N = 128


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _is_unicode(cls, sent: object) -> object:
        """JSON can spell half a character, which nobody can answer, log or look up."""
        if isinstance(sent, dict):
            try:
                json.dumps(sent, ensure_ascii=False).encode()
            except UnicodeEncodeError as error:
                raise ValueError(f"{error.object[error.start : error.end]!a} is half a character: expected Unicode") from None
        return sent


class StreamOptions(Body):
    include_usage: bool = False
    """A last event with no choices says how many tokens were used."""


class CompletionRequest(Body):
    """`POST /v1/completions`. Field names and defaults are OpenAI's and vLLM's."""

    model: str | None = None
    """None: the one that is served."""
    prompt: (
        Annotated[str, Field(min_length=1)]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1, max_length=MAX_PROMPTS)]
    )
    """Text, token ids, or a list of either; each prompt has `n` choices, numbered prompt by prompt."""
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = 16
    """None: as many as the model length leaves."""
    n: Annotated[int, Field(ge=1, le=MAX_N)] = 1
    temperature: Annotated[float, Field(ge=0)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = 0
    """-1 and 0: all tokens."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = 0.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    ignore_eos: bool = False
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Only prompts of the same salt share prefixes in the cache."""
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = False
    """Add the ids of the prompt's and the output's tokens."""
    return_tokens_as_token_ids: bool | None = False
    """Name tokens in `logprobs` as `token_id:7`."""
    user: str | None = None
    """Ignored."""

    # What this engine does not have.
    stop: Annotated[list[str], Field(max_length=0)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=0)] | None = None
    suffix: None = None
    echo: Literal[False] | None = False
    best_of: None = None
    logit_bias: Annotated[dict[str, float], Field(max_length=0)] | None = None
    frequency_penalty: Zero | None = 0.0
    presence_penalty: Zero | None = 0.0
    repetition_penalty: One | None = 1.0
    min_tokens: Annotated[int, Field(ge=0, le=0)] = 0

    @model_validator(mode="after")
    def _options_belong_to_a_stream(self) -> CompletionRequest:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options without stream=true")
        return self

    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts one by one."""
        match self.prompt:
            case str() as text:
                return [text]
            case [int(), *_]:
                return [self.prompt]  # pyright: ignore[reportReturnType]
            case prompts:
                return prompts  # pyright: ignore[reportReturnType]

    def sampling_params(self, *, room: int) -> SamplingParams:
        """The engine's parameters, for a prompt that leaves `room` tokens of the model length."""
        return SamplingParams(
            max_tokens=max(1, room) if self.max_tokens is None else self.max_tokens,
            ignore_eos=self.ignore_eos,
            cache_salt=self.cache_salt,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            seed=self.seed,
            logprobs=self.logprobs,
            n=self.n,
            output_kind="delta" if self.stream else "final_only",
        )


class CompletionLogprobs(BaseModel):
    """One entry a token in each list."""

    text_offset: list[int]
    """Where the token begins, in the names of the tokens joined."""
    tokens: list[str]
    token_logprobs: list[float]
    """Natural logarithms, before temperature and filters."""
    top_logprobs: list[dict[str, float]]


class WeightVersionSpan(BaseModel):
    """Output tokens [start, end) were sampled by the weights labelled `version`."""

    version: str
    start: int
    end: int


class CompletionChoice(BaseModel):
    """Of an answer all of it; of a stream's event what is new in it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: Literal["length", "stop", "abort"] | None = None
    """None while the choice goes on."""
    stop_reason: None = None
    prompt_token_ids: list[int] | None = None
    """Under `return_token_ids`; in a stream once for each choice."""
    token_ids: list[int] | None = None
    """Under `return_token_ids`."""
    weight_versions: list[WeightVersionSpan] | None = None
    """Spans that partition the whole output; None while the choice goes on."""


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(BaseModel):
    """The answer, or an event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    """Seconds since 1970."""
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ModelCard(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["caesura"] = "caesura"
    root: str
    """The checkpoint."""
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    status: Literal["running", "pausing", "paused", "sleeping"]
