"""A request has one label, stamped when it was handed in; it may wait across an update."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "vllm#54443"
CAUGHT_BY = "version-attribution"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.core import EngineCore
    from engine.request import Request

    submit, append = EngineCore.submit, Request.append

    def labelled(self: EngineCore, request_id: str, *arguments: Any) -> str:
        state = submit(self, request_id, *arguments)
        vars(self.scheduler.requests[request_id])["label"] = self.weight_version
        return state

    def appended(self: Request, token_id: int, *, version: str) -> None:
        append(self, token_id, version=vars(self)["label"])

    patch(EngineCore, "submit", labelled)
    patch(Request, "append", appended)
