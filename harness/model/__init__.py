"""THE SPECIFICATION: a pure, deterministic state machine of one engine.

Given the same operations and the same sampled tokens, an engine must produce the
events that this model produces, in the same order, and be in the same state after
each. The model knows the contract and no engine: an error in one is therefore
unlikely to be repeated in the other.
"""

from __future__ import annotations

from harness.model.engine import EngineModel
from harness.model.profile import CAESURA, Profile

__all__ = ["CAESURA", "EngineModel", "Profile"]
