"""Two requests that sampled in one step are handed each other's token."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K01: the client's tokens are not those that were sampled"
CAUGHT_BY = "token-conservation"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.core import EngineCore

    right = EngineCore.take_outputs

    def take_outputs(self: EngineCore) -> Any:
        outputs = right(self)
        given = [index for index, output in enumerate(outputs) if output.token_ids]
        if len(given) >= 2:
            a, b = given[:2]
            one, other = outputs[a], outputs[b]
            outputs[a], outputs[b] = one._replace(token_ids=other.token_ids), other._replace(token_ids=one.token_ids)
        return outputs

    patch(EngineCore, "take_outputs", take_outputs)
