"""A request as the scheduler knows it."""

from __future__ import annotations

from typing import Literal

from harness.events import FinishReason, VersionSpan
from harness.model.labels import Parent
from harness.operations import Submit
from harness.state import RequestState, Status


class Request:
    """Tokens, progress and blocks of a request that was handed in and has not ended (rule R3)."""

    __slots__ = (
        "blocks",
        "computed",
        "ended",
        "id",
        "ignore_eos",
        "labels",
        "length_limit",
        "num_preemptions",
        "num_prompt_tokens",
        "parked",
        "placeholders",
        "published",
        "salt",
        "span_starts",
        "status",
        "tokens",
        "version",
    )

    def __init__(self, submit: Submit, prompt: tuple[int, ...], *, max_model_len: int) -> None:
        self.id = submit.id
        self.tokens = list(prompt)
        """Prompt and generated tokens."""
        self.num_prompt_tokens = len(prompt)
        self.length_limit = min(len(prompt) + submit.max_tokens, max_model_len)
        """The number of tokens at which it ends for reason `length`."""
        self.ignore_eos = submit.ignore_eos
        self.salt = submit.cache_salt
        self.status: Status | Literal["blocked"] = "waiting"
        self.parked = False
        self.ended: FinishReason | None = None
        self.computed = 0
        """Tokens whose KV launched steps compute; those that steps in flight will sample are counted like known ones."""
        self.placeholders = 0
        """Tokens that steps in flight will sample for this life of it."""
        self.blocks: list[int] = []
        self.published = 0
        """How many of its first blocks have a label in this life, hit ones included."""
        self.labels: list[int] = []
        """Labels of its first blocks as far as they are known. Contents never change, so these outlive a preemption."""
        self.num_preemptions = 0
        self.version: str | None = None
        """The weight version of its newest output token."""
        self.span_starts: list[tuple[str, int]] = []
        """Each change of `version`: the new one and the output index from which on it holds."""

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    def block_tokens(self, index: int, block_size: int) -> tuple[int, ...]:
        """The tokens of its block number `index`, which must be a full one."""
        return tuple(self.tokens[index * block_size : (index + 1) * block_size])

    def parent(self, index: int) -> Parent:
        """What stands before its block number `index`; the labels of the blocks before it must be known."""
        return self.labels[index - 1] if index else self.salt

    def spans(self) -> tuple[VersionSpan, ...]:
        """Its output, partitioned by the version that sampled it; neighbours differ."""
        ends = [start for _, start in self.span_starts[1:]]
        ends.append(self.num_output_tokens)
        return tuple(VersionSpan(version, start, end) for (version, start), end in zip(self.span_starts, ends, strict=False))

    def state(self) -> RequestState:
        """What two engines must agree on. Only for an accepted request."""
        assert self.status != "blocked", f"{self.id} is not accepted yet"
        return RequestState(
            id=self.id,
            status=self.status,
            num_prompt_tokens=self.num_prompt_tokens,
            output=tuple(self.tokens[self.num_prompt_tokens :]),
            num_computed_tokens=self.computed,
            num_preemptions=self.num_preemptions,
            num_output_placeholders=self.placeholders,
            blocks=tuple(self.blocks),
            parked=self.parked,
        )
