"""Tokens without a network: what a simulation samples.

A token tells who sampled it, where, and under which weights, so that one that was lost,
doubled or sampled by other weights is seen by comparing outputs; it is the same in every
process and on every machine.
"""

from __future__ import annotations

from harness.operations import PROMPT_VOCABULARY

_MASK = (1 << 64) - 1
_PRIME = (1 << 61) - 1


def symbolic_token(request_id: str, position: int, epoch: int, seed: int = 0) -> int:
    """The token at `position` (the prompt's first is 0) of a request, sampled by the weights of `epoch`.

    It is drawn from PROMPT_VOCABULARY (16 to 255), which holds no end-of-sequence token:
    simulated requests end by length alone.
    """
    name = int.from_bytes(request_id.encode(), "little") % _PRIME
    mixed = (name * 0x9E3779B97F4A7C15 + position * 0xBF58476D1CE4E5B9 + epoch * 0x94D049BB133111EB + seed * 0xD6E8FEB86659FD93) & _MASK
    # The finaliser of splitmix64 (Steele et al., OOPSLA 2014), as in operations.py.
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return PROMPT_VOCABULARY[(mixed ^ (mixed >> 31)) % len(PROMPT_VOCABULARY)]
