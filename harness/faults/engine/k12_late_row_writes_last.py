"""A late row, of a request that has ended, writes its KV after the next step, into blocks that may be another's by then."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "vllm-ascend#14055"
CAUGHT_BY = "golden"
SHALLOW = False
ENGINE = {"async_scheduling": True, "num_blocks": 8}


def plant(patch: Patch) -> None:
    from engine.device import to_device
    from engine.model_runner import ModelRunner
    from engine.tiles import Rows

    right = ModelRunner.launch

    def launch(self: ModelRunner, batch: Sequence[Any], copies: Sequence[Any] = ()) -> Any:
        late, vars(self)["late"] = vars(self).get("late", []), [(share.request, _row(share)) for share in batch]
        flight = right(self, batch, copies)
        for request, row in late:
            if request.finish_reason is not None:
                self.tiled.logits(self.kv_cache, to_device([0] * row.num_tokens, self.device), [row])
        return flight

    def _row(share: Any) -> Rows:
        return Rows(share.num_tokens, share.first, list(share.request.blocks), 0)

    patch(ModelRunner, "launch", launch)
