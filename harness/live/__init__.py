"""Live engines: a driver that calls one in real time, and what reads and writes a rank's log meanwhile."""

from __future__ import annotations

from harness.live.driver import Live
from harness.live.rank import Rank
from harness.live.recording import RankLog

__all__ = ["Live", "Rank", "RankLog"]
