"""The version is read when the answer is put together: every token gets the label of the last one."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "AReaL#1569, rllm#622"
CAUGHT_BY = "version-attribution"
SHALLOW = False


def plant(patch: Patch) -> None:
    from engine.outputs import VersionSpan
    from engine.request import Request

    right = Request.append

    def append(self: Request, token_id: int, *, version: str) -> None:
        right(self, token_id, version=version)
        self._spans = [VersionSpan(version, 0, self.num_output_tokens)]

    patch(Request, "append", append)
