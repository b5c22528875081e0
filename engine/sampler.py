"""Logits -> tokens: greedy, or drawn at random in a way that no batch, chunking or pause can change.

What is random about a token is a function of its request's seed and its position alone
(counter-based, as in Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
so no generator has a state that a pause could lose or a preemption repeat. Drawing is by
the Gumbel-max trick: the largest of logits plus Gumbel noise is a draw from their softmax.

Each row is treated alone: an operation over several rows might give them other bits.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple

import torch

from .config import SamplingParams
from .outputs import TokenLogprobs

_FIXED_POINT = 1 << 48
"""Probabilities are summed as integers of this unit: such a sum has no order."""


class SampledToken(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None
    """None unless the request asked for them."""


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


def sample(logits: torch.Tensor, draws: Iterable[Draw]) -> list[SampledToken]:
    """A token for each row.

    Args:
        logits: [rows, vocabulary], finite.
        draws: one for each row.
    """
    draws = list(draws)
    best = logits.argmax(dim=1).tolist()
    token_ids = [
        token_id if draw.params.temperature == 0 else _drawn(row, draw) for token_id, row, draw in zip(best, logits, draws, strict=True)
    ]
    logprobs = [_logprobs(row, token_id, draw.params.logprobs) for row, token_id, draw in zip(logits, token_ids, draws, strict=True)]
    return list(map(SampledToken, token_ids, logprobs))


def _drawn(row: torch.Tensor, draw: Draw) -> int:
    """Temperature, then min-p, top-k and top-p in vLLM's order, each on what the one before left."""
    params = draw.params
    # In double precision, and moved so that the largest is 0: no temperature makes it overflow.
    scores = (row.double() - row.max()) / params.temperature
    if params.min_p > 0:
        scores = scores.masked_fill(scores.exp() < params.min_p, -torch.inf)
    if 0 < params.top_k < len(scores):
        _keep(scores, _ranked(scores)[: params.top_k])
    if params.top_p < 1:
        ranked = _ranked(scores)
        mass = (scores.softmax(dim=0)[ranked] * _FIXED_POINT).long()
        before = mass.cumsum(dim=0) - mass
        _keep(scores, ranked[before < params.top_p * _FIXED_POINT])
    return int((scores + _gumbel(draw, len(scores), row.device)).argmax())


def _ranked(scores: torch.Tensor) -> torch.Tensor:
    """Token ids from the best to the worst, equals in the order of their ids."""
    return scores.sort(descending=True, stable=True).indices


def _keep(scores: torch.Tensor, token_ids: torch.Tensor) -> None:
    kept = scores[token_ids]
    scores.fill_(-torch.inf)
    scores[token_ids] = kept


def _gumbel(draw: Draw, count: int, device: torch.device) -> torch.Tensor:
    """Gumbel noise for each token id: float64 [count]."""
    key = blake2b(draw.stream + draw.position.to_bytes(8, "little"), digest_size=8).digest()
    bits = _mixed(int.from_bytes(key, "little", signed=True), count, device)
    uniform = ((bits >> 11) & ((1 << 53) - 1)).double().add(0.5).mul(2.0**-53)
    return -(-uniform.log()).log()


def _mixed(key: int, count: int, device: torch.device) -> torch.Tensor:
    """`count` outputs of splitmix64 from state `key` on (Steele et al., OOPSLA 2014): int64, which wraps as it must."""
    z = torch.arange(1, count + 1, device=device) * _signed(0x9E3779B97F4A7C15) + key
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return z ^ _shifted(z, 31)


def _shifted(z: torch.Tensor, count: int) -> torch.Tensor:
    """Shifted right without its sign."""
    return (z >> count) & ((1 << (64 - count)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 64) if word >> 63 else word


def _logprobs(row: torch.Tensor, token_id: int, count: int | None) -> TokenLogprobs | None:
    """Of the model's own distribution, before temperature and filters."""
    if count is None:
        return None
    logprobs = row.double().log_softmax(dim=0)
    ranked = _ranked(logprobs)[:count]
    top = tuple(zip(ranked.tolist(), logprobs[ranked].tolist(), strict=True))
    return TokenLogprobs(float(logprobs[token_id]), top)
