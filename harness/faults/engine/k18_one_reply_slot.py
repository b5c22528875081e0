"""Of two pause(wait) calls only the later one is remembered; the first caller is never answered."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "tokenspeed#346"
CAUGHT_BY = "idempotent-control"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore.begin_pause

    def begin_pause(self: EngineCore, mode: Any = "abort", **options: Any) -> Any:
        earlier = [ticket for ticket in self._tickets if ticket.mode == mode == "wait"]
        ticket = right(self, mode, **options)
        self._tickets = [ticket for ticket in self._tickets if ticket not in earlier]
        return ticket

    patch(EngineCore, "begin_pause", begin_pause)
