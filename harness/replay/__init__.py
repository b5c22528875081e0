"""Rebuilds an engine's state from its event log: time travel, and the facts that invariants judge.

This is a third, independent reading of docs/semantics.md beside the engine and the model: it only
adds up what the log says happened, and decides nothing. So it is total: a log that no right engine
could have written still replays, each event having its most plausible effect, and complaining is
left to the invariants. Events are numbered by `seq`, which also serves as the clock: a KV entry is
stamped with the number of the `launched` that wrote it, from which its epoch follows.
"""

from harness.replay.blocks import Blocks
from harness.replay.facts import BLOCKS_SEEN, DROPPED, NEVER, Call, Flight, Request, Weights
from harness.replay.rebuild import Replay, replay

__all__ = ["BLOCKS_SEEN", "DROPPED", "NEVER", "Blocks", "Call", "Flight", "Replay", "Request", "Weights", "replay"]
