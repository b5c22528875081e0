"""The dimensions of an engine, as far as its scheduler can see them."""

from __future__ import annotations

from typing import Literal, Protocol


class Shape(Protocol):
    """What the model reads of an engine's configuration; a scenario's `engine:` section has it all."""

    @property
    def block_size(self) -> int:
        """Tokens in a KV block."""
        ...

    @property
    def num_blocks(self) -> int:
        """Usable KV blocks."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens, prompt and output together, at which a request ends."""
        ...

    @property
    def max_num_seqs(self) -> int:
        """Requests that may run at once."""
        ...

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens that a step may compute."""
        ...

    @property
    def prefix_caching(self) -> bool:
        """Whether full blocks are published, and looked up at admission."""
        ...

    @property
    def long_prefill_token_threshold(self) -> int:
        """Tokens that one request may have in a step while there are others; 0: no such limit."""
        ...

    @property
    def late_requests(self) -> Literal["queue", "reject", "block"]:
        """What becomes of a request handed in while paused or out of service."""
        ...

    @property
    def async_scheduling(self) -> bool:
        """Whether one step is in flight while the next is scheduled and launched."""
        ...

    @property
    def host_blocks(self) -> int:
        """Slots of the host tier that keeps evicted blocks; 0: there is none."""
        ...
