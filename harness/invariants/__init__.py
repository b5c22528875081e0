"""The promises of docs/semantics.md as named invariants, each judged on any log that shows enough.

The registry `INVARIANTS` holds them by id; `judge` judges a whole log and `Judge` one that grows.
"""

from __future__ import annotations

from harness.invariants import cache, lifecycle, pause, tokens, versions
from harness.invariants.invariant import INVARIANTS, REPORTED, Invariant, invariant
from harness.invariants.judge import Judge, judge

__all__ = ["INVARIANTS", "REPORTED", "Invariant", "Judge", "cache", "invariant", "judge", "lifecycle", "pause", "tokens", "versions"]
