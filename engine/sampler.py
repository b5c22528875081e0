"""Logits -> tokens: greedy, or drawn at random in a way that no batch, chunking or pause can change.

What is random about a token is a function of its request's seed and its position alone
(counter-based, as in Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
so no generator has a state that a pause could lose or a preemption repeat. Drawing is by
the Gumbel-max trick: the largest of logits plus Gumbel noise is a draw from their softmax.

Each row is treated alone: an operation over several rows might give them other bits.
Nothing here waits for the device: its tokens may be the input of a step that is launched before the host knows them.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import torch

from .config import SamplingParams
from .device import HostCopy
from .outputs import TokenLogprobs
from .splitmix import mixed, states

_FIXED_POINT = 1 << 48
"""Probabilities are summed as integers of this unit: such a sum has no order."""


class SampledToken(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None
    """None unless the request asked for them."""


class RowLogprobs(NamedTuple):
    """Log probabilities of one row, on the device: float64 [], and int64 and float64 [as many as were asked for]."""

    chosen: torch.Tensor
    top_ids: torch.Tensor
    top: torch.Tensor


class SampledRows(NamedTuple):
    """A token for each row, on the device."""

    token_ids: torch.Tensor
    """int64 [rows]"""
    logprobs: tuple[RowLogprobs | None, ...]

    def to_host(self) -> SampledCopy:
        """Send the tokens to the host, without waiting for them."""
        logprobs = tuple(None if row is None else tuple(map(HostCopy, row)) for row in self.logprobs)
        return SampledCopy(HostCopy(self.token_ids), logprobs)


class SampledCopy(NamedTuple):
    """Tokens on their way to the host."""

    token_ids: HostCopy
    logprobs: tuple[tuple[HostCopy, ...] | None, ...]

    def wait(self) -> list[SampledToken]:
        token_ids = self.token_ids.wait().tolist()
        return [SampledToken(token_id, _told(row)) for token_id, row in zip(token_ids, self.logprobs, strict=True)]


class Draw(NamedTuple):
    """Everything but the logits that decides a token."""

    params: SamplingParams
    stream: bytes
    """The request's stream of random numbers, from `stream_of`."""
    position: int
    """Of the token to be chosen; the prompt's first has 0."""


def stream_of(params: SamplingParams, request_id: str) -> bytes:
    """What a request's random numbers begin from: its seed, or without one its id."""
    said = f"id {request_id}" if params.seed is None else f"seed {params.seed}"
    return blake2b(said.encode("utf-8", "surrogatepass"), digest_size=16).digest()


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> SampledRows:
    """A token for each row.

    Args:
        logits: [rows, vocabulary], finite.
        draws: one for each row.
    """
    assert len(logits) == len(draws), (logits.shape, len(draws))
    token_ids = logits.argmax(dim=1)
    for index, draw in enumerate(draws):
        if draw.params.temperature > 0:
            token_ids[index] = _drawn(logits[index], draw)
    logprobs = tuple(_logprobs(logits[index], token_ids[index], draw.params.logprobs) for index, draw in enumerate(draws))
    return SampledRows(token_ids, logprobs)


def _drawn(row: torch.Tensor, draw: Draw) -> torch.Tensor:
    """Temperature, then min-p, top-k and top-p in vLLM's order, each on what the one before left."""
    params = draw.params
    # In double precision, and moved so that the largest is 0: no temperature makes it overflow.
    scores = (row.double() - row.max()) / params.temperature
    if params.min_p > 0:
        scores = scores.masked_fill(scores.exp() < params.min_p, -torch.inf)
    if 0 < params.top_k < len(scores):
        scores = _only(scores, _ranked(scores)[: params.top_k])
    if params.top_p < 1:
        ranked = _ranked(scores)
        mass = (scores.softmax(dim=0)[ranked] * _FIXED_POINT).long()
        before = mass.cumsum(dim=0) - mass
        beyond = torch.empty_like(before, dtype=torch.bool).index_copy_(0, ranked, before >= params.top_p * _FIXED_POINT)
        scores = scores.masked_fill(beyond, -torch.inf)
    return (scores + _gumbel(draw, len(scores), row.device)).argmax()


def _ranked(scores: torch.Tensor) -> torch.Tensor:
    """Token ids from the best to the worst, equals in the order of their ids."""
    return scores.sort(descending=True, stable=True).indices


def _only(scores: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The scores of these tokens, and minus infinity for all others."""
    return torch.full_like(scores, -torch.inf).index_copy_(0, token_ids, scores.index_select(0, token_ids))


def _gumbel(draw: Draw, count: int, device: torch.device) -> torch.Tensor:
    """Gumbel noise for each token id: float64 [count]."""
    key = blake2b(draw.stream + draw.position.to_bytes(8, "little"), digest_size=8).digest()
    bits = mixed(states(int.from_bytes(key, "little", signed=True), 1, count, device))
    uniform = ((bits >> 11) & ((1 << 53) - 1)).double().add(0.5).mul(2.0**-53)
    return -(-uniform.log()).log()


def _logprobs(row: torch.Tensor, token_id: torch.Tensor, count: int | None) -> RowLogprobs | None:
    """Of the model's own distribution, before temperature and filters."""
    if count is None:
        return None
    logprobs = row.double().log_softmax(dim=0)
    ranked = _ranked(logprobs)[:count]
    return RowLogprobs(logprobs.index_select(0, token_id.reshape(1))[0], ranked, logprobs.index_select(0, ranked))


def _told(row: tuple[HostCopy, ...] | None) -> TokenLogprobs | None:
    if row is None:
        return None
    chosen, top_ids, top = (copy.wait() for copy in row)
    return TokenLogprobs(float(chosen), tuple(zip(top_ids.tolist(), top.tolist(), strict=True)))
