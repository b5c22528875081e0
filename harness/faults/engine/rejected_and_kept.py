"""A late request is answered with a rejection and queued all the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K06: client and engine disagree about who was taken on"
CAUGHT_BY = "one-ending"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore
    from engine.errors import RequestRejected
    from engine.request import Request

    right = EngineCore.submit

    def submit(self: EngineCore, request_id: str, prompt_token_ids: Sequence[int], params: Any) -> Any:
        try:
            return right(self, request_id, prompt_token_ids, params)
        except RequestRejected:
            self.scheduler.add(Request(request_id, prompt_token_ids, params, self.config.block_size), parked=True)
            raise

    patch(EngineCore, "submit", submit)
