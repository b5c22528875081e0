"""An abort while paused takes effect with the next step, and none runs."""

from __future__ import annotations

from collections.abc import Iterable

from harness.faults.fault import Patch

STANDS_FOR = "prime-rl#2841"
CAUGHT_BY = "api-truth"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    abort, step = EngineCore.abort, EngineCore.step

    def noted(self: EngineCore, request_ids: Iterable[str] | None) -> int:
        if not self.is_paused():
            return abort(self, request_ids)
        doomed = list(self.scheduler.requests) if request_ids is None else [id for id in request_ids if id in self.scheduler.requests]
        vars(self).setdefault("doomed", []).extend(doomed)
        return len(set(doomed))

    def carried_out(self: EngineCore) -> None:
        abort(self, vars(self).pop("doomed", []))
        step(self)

    patch(EngineCore, "abort", noted)
    patch(EngineCore, "step", carried_out)
