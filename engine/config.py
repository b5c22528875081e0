"""The shape of an engine and of a request's sampling, validated where they are written down.

A pool too small or a budget below the number of sequences would otherwise show
only as a hang, many steps later.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Literal, get_args

from .errors import InvalidArgument

LateRequests = Literal["queue", "reject", "block"]
DType = Literal["float32", "bfloat16", "float16"]
OutputKind = Literal["cumulative", "delta", "final_only"]

_LEAST = {
    "block_size": 1,
    "num_blocks": 1,
    "max_model_len": 2,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "long_prefill_token_threshold": 0,
    "host_blocks": 0,
}
"""Smallest value of each count. A model length of 1 would leave no room for a prompt and a token."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """What an engine is made of.

    Raises:
        ValueError: a value that no engine can work with.
    """

    checkpoint: str | Path
    """Folder with config.json and safetensors of a decoder-only causal language model."""
    block_size: int
    """Tokens whose KV one block holds."""
    num_blocks: int
    """Usable blocks of the KV pool, ids 0 to num_blocks - 1."""
    max_model_len: int
    """Longest sequence, prompt and generated tokens together. It may need more blocks than there are: `submit` checks each request."""
    max_num_seqs: int
    """Most requests running at a time."""
    max_num_batched_tokens: int
    """Token budget of a step."""
    prefix_caching: bool = True
    long_prefill_token_threshold: int = 0
    """Most tokens of one request in a step when there are several requests; 0: no limit."""
    late_requests: LateRequests = "queue"
    """What becomes of a request handed in while paused or out of service: parked in the queue, refused, or held in front of it."""
    async_scheduling: bool = False
    """Launch a step while the one before it is in flight, so that the device need not wait for the host."""
    host_blocks: int = 0
    """Slots of a tier in host memory that keeps evicted blocks; 0: none."""
    dtype: DType = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}, got {value!r}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs ({self.max_num_seqs}): "
                "a step could not give each running request one token; raise the former or lower the latter"
            )
        for name, allowed in (("late_requests", get_args(LateRequests)), ("dtype", get_args(DType))):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen and when it ends. Checked by `EngineCore.submit`."""

    max_tokens: int = 16
    """Most generated tokens, at least 1."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    cache_salt: str | None = None
    """Requests share prefix blocks only with requests of the same salt."""
    temperature: float = 0.0
    """Divides the logits; 0: greedy, and the filters below have no effect."""
    top_p: float = 1.0
    """Draw from the fewest best tokens whose probabilities sum to at least this; 1: from all."""
    top_k: int = 0
    """Draw from so many of the best tokens; 0: from all."""
    min_p: float = 0.0
    """Draw from tokens at least this probable in relation to the best one; 0: from all."""
    seed: int | None = None
    """What the request's draws are a function of, together with positions; None: its id takes the seed's place."""
    logprobs: int | None = None
    """Report each token's log probability, and those of so many best tokens; None: none."""
    n: int = 1
    """How many sequences `AsyncLLM.generate` makes of one prompt; the core makes one of each."""
    output_kind: OutputKind = "cumulative"
    """What `AsyncLLM.generate` yields: all tokens so far, those since the last time, or everything once at the end."""

    def check(self) -> None:
        """Raises: InvalidArgument, for a value that has no meaning."""
        if self.max_tokens < 1:
            raise InvalidArgument(f"max_tokens must be at least 1, got {self.max_tokens}")
        if self.n != 1:
            raise InvalidArgument(f"n must be 1 for the core, got {self.n!r}; AsyncLLM.generate makes several sequences of one prompt")
        if not (isfinite(self.temperature) and self.temperature >= 0):
            raise InvalidArgument(f"temperature must be a finite number of at least 0 (0 is greedy), got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise InvalidArgument(f"top_p must be above 0 and at most 1 (1 is no limit), got {self.top_p}")
        if self.top_k < 0:
            raise InvalidArgument(f"top_k must be at least 0 (0 is no limit), got {self.top_k}")
        if not 0 <= self.min_p <= 1:
            raise InvalidArgument(f"min_p must be from 0 to 1 (0 is no limit), got {self.min_p}")
        if self.logprobs is not None and self.logprobs < 0:
            raise InvalidArgument(f"logprobs must be at least 0 (0: the chosen token's alone), or None for none, got {self.logprobs}")
