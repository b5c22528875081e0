"""The promises of docs/semantics.md as named invariants, each judged on any log that shows enough.

The registry `INVARIANTS` holds them by id; `judge` judges a whole log and `Judge` one that grows.
"""

from __future__ import annotations

from harness.invariants import (
    cache,
    client,
    control,
    frames,
    lifecycle,
    numbers,
    pause,
    records,
    resets,
    tokens,
    updates,
    versions,
    weights,
)
from harness.invariants.invariant import CLIENT_INVARIANTS, INVARIANTS, REPORTED, ClientInvariant, Invariant, client_invariant, invariant
from harness.invariants.judge import Judge, judge

__all__ = [
    "CLIENT_INVARIANTS",
    "INVARIANTS",
    "REPORTED",
    "ClientInvariant",
    "Invariant",
    "Judge",
    "cache",
    "client",
    "client_invariant",
    "control",
    "frames",
    "invariant",
    "judge",
    "lifecycle",
    "numbers",
    "pause",
    "records",
    "resets",
    "tokens",
    "updates",
    "versions",
    "weights",
]
