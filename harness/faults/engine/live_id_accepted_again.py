"""A request is accepted under the id of one that is live, which nobody can end any more."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "vllm: an assertion of its scheduler (read in its sources)"
CAUGHT_BY = "one-ending"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore._check_request

    def check_request(self: EngineCore, request_id: str, *arguments: Any) -> None:
        right(self, f"{request_id}/again", *arguments)

    patch(EngineCore, "_check_request", check_request)
