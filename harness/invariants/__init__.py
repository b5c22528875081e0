"""The promises of docs/semantics.md as named invariants, each judged on any log that shows enough.

The registry `INVARIANTS` holds them by id; `judge` judges a whole log and `Judge` one that grows.
"""

from __future__ import annotations

from harness.invariants import cache, control, frames, lifecycle, numbers, pause, records, resets, tokens, updates, versions
from harness.invariants.invariant import INVARIANTS, REPORTED, Invariant, invariant
from harness.invariants.judge import Judge, judge

__all__ = [
    "INVARIANTS",
    "REPORTED",
    "Invariant",
    "Judge",
    "cache",
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
]
