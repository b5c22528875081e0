"""What the core hands to its callers: generated tokens, and the receipt of a pause call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .errors import PauseSuperseded

FinishReason = Literal["length", "stop", "abort"]
PauseMode = Literal["abort", "wait", "keep"]
DropReason = Literal["aborted", "finished"]
Tag = Literal["kv_cache", "weights"]
"""What can be asleep by itself: the memory of the KV pool, that of the weights."""
SleepLevel = Literal[0, 1, 2]
"""0 gives no memory back, 1 moves the weights to the host and drops the KV, 2 drops both."""


class VersionSpan(NamedTuple):
    """Output tokens [start, end) were sampled by the weights labelled `version`."""

    version: str
    start: int
    end: int


class TokenLogprobs(NamedTuple):
    """How probable the model itself found a token, before temperature and filters."""

    chosen: float
    """Natural logarithm of the token's probability."""
    top: tuple[tuple[int, float], ...]
    """(token id, log probability) of the best tokens, as many as were asked for."""


class EngineCoreOutput(NamedTuple):
    """Tokens of one request that no caller has seen before."""

    request_id: str
    first: int
    """Output index of the first of these tokens; 0 is the first generated token."""
    token_ids: tuple[int, ...]
    """Empty only for an aborted request, whose tokens were all handed over before."""
    finish_reason: FinishReason | None
    """None while the request goes on."""
    weight_versions: tuple[VersionSpan, ...] | None
    """Spans that partition the whole output; None while the request goes on."""
    logprobs: tuple[TokenLogprobs, ...] | None = None
    """One for each of these tokens; None unless the request asked for them."""


@dataclass(eq=False)
class PauseTicket:
    """One pause or sleep call that has been taken up. It is done when the pause took effect or a later call overrode it."""

    mode: PauseMode
    """What this call still waits for; an abort that joins it leaves nothing else to wait for, and sets it to `abort`."""
    clear_cache: bool
    sleep_level: int | None = None
    """What falls asleep when the pause takes effect; None for a call of `begin_pause`."""
    done: bool = field(default=False, init=False)
    error: PauseSuperseded | None = field(default=None, init=False)
    """Set when the pause was superseded instead of taking effect."""

    def take_effect(self) -> None:
        assert not self.done, self
        self.done = True

    def supersede(self, by: str) -> None:
        assert not self.done, self
        self.done = True
        call = f"pause({self.mode!r})" if self.sleep_level is None else f"sleep({self.sleep_level})"
        self.error = PauseSuperseded(f"{call} was overridden by {by} before it took effect; repeat it if it is still wanted")
