"""The shape of an engine and of a request's sampling, validated where they are written down.

A pool too small or a budget below the number of sequences would otherwise show
only as a hang, many steps later.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

LateRequests = Literal["queue", "reject", "block"]
DType = Literal["float32", "bfloat16", "float16"]

_LEAST = {
    "block_size": 1,
    "num_blocks": 1,
    "max_model_len": 2,
    "max_num_seqs": 1,
    "max_num_batched_tokens": 1,
    "long_prefill_token_threshold": 0,
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
    """How a request's tokens are chosen (greedily) and when it ends. Checked by `EngineCore.submit`."""

    max_tokens: int = 16
    """Most generated tokens, at least 1."""
    ignore_eos: bool = False
    """Go on after an end-of-sequence token."""
    cache_salt: str | None = None
    """Requests share prefix blocks only with requests of the same salt."""
