"""A request as the core sees it: its tokens, how far they are computed, and the blocks that hold their KV."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from .blocks import PrefixDigests
from .config import SamplingParams
from .outputs import FinishReason, VersionSpan
from .sampler import stream_of


class RequestStatus(Enum):
    BLOCKED = "blocked"
    """Held in front of the core by the late-request policy `block`: not accepted yet."""
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Waiting again, its blocks given back; its generated tokens are kept."""
    FINISHED = "finished"


class Request:
    """One sequence of tokens. Only the scheduler changes it."""

    def __init__(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, block_size: int) -> None:
        self.request_id = request_id
        self.params = params
        self.num_prompt_tokens = len(prompt_token_ids)
        self.token_ids = list(prompt_token_ids)
        """Prompt and generated tokens."""
        self.num_computed_tokens = 0
        """Leading tokens whose KV is in `blocks`, those of launched steps included."""
        self.num_output_placeholders = 0
        """Tokens that steps in flight will sample for it, in this life."""
        self.finish_reason: FinishReason | None = None
        self.status = RequestStatus.WAITING
        self.parked = False
        """Accepted while paused or out of service: not admitted before resume or a later `wait`."""
        self.num_preemptions = 0
        self.blocks: list[int] = []
        """Block table: block i holds positions i * block_size to (i + 1) * block_size - 1."""
        self.num_registered_blocks = 0
        """Leading blocks that have been published, or claimed as hits, in this life."""
        self.stream = stream_of(params, request_id)
        """Where its random numbers come from."""
        self.digests = PrefixDigests(block_size, params.cache_salt)
        self._spans: list[VersionSpan] = []

    def __repr__(self) -> str:
        return (
            f"<Request {self.request_id} {self.status.value}{' parked' if self.parked else ''}: "
            f"{self.num_prompt_tokens}+{self.num_output_tokens} tokens, {self.num_computed_tokens} computed, blocks {self.blocks}>"
        )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_expected_tokens(self) -> int:
        """Its tokens, those in flight included."""
        return len(self.token_ids) + self.num_output_placeholders

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> tuple[int, ...]:
        return tuple(self.token_ids[self.num_prompt_tokens :])

    @property
    def weight_versions(self) -> tuple[VersionSpan, ...]:
        """Spans that partition the output by the version resident when each token was sampled."""
        return tuple(self._spans)

    def append(self, token_id: int, *, version: str) -> None:
        """Record a token that the weights labelled `version` have just sampled."""
        index = self.num_output_tokens
        self.token_ids.append(token_id)
        if self._spans and self._spans[-1].version == version:
            self._spans[-1] = self._spans[-1]._replace(end=index + 1)
        else:
            self._spans.append(VersionSpan(version, index, index + 1))
