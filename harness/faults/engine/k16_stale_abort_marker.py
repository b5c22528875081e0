"""An abort that crosses its request's end leaves a marker, which ends the next request of that id."""

from __future__ import annotations

from collections.abc import Iterable

from harness.faults.fault import Patch

STANDS_FOR = "FastDeploy#7825"
CAUGHT_BY = "api-truth"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    abort, step = EngineCore.abort, EngineCore.step

    def marked(self: EngineCore, request_ids: Iterable[str] | None) -> int:
        request_ids = None if request_ids is None else list(request_ids)
        gone = [id for id in request_ids or () if id not in self.scheduler.requests]
        vars(self).setdefault("markers", set()).update(gone)
        return abort(self, request_ids)

    def swept(self: EngineCore) -> None:
        markers = vars(self).get("markers", set())
        doomed = [id for id in self.scheduler.requests if id in markers]
        markers.difference_update(doomed)
        abort(self, doomed)
        step(self)

    patch(EngineCore, "abort", marked)
    patch(EngineCore, "step", swept)
