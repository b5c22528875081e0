"""After a preemption a request's outputs are numbered from 0 again."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K01: output shifted"
CAUGHT_BY = "token-conservation"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.core import EngineCore
    from engine.request import Request
    from engine.scheduler import Scheduler

    preempt, right = Scheduler._preempt, EngineCore._emit

    def preempted(self: Scheduler, request: Request, **options: Any) -> None:
        vars(request)["given"] = request.num_output_tokens
        preempt(self, request, **options)

    def emit(self: EngineCore, request: Request, *arguments: Any) -> None:
        right(self, request, *arguments)
        output = self._outputs[-1]
        self._outputs[-1] = output._replace(first=output.first - vars(request).get("given", 0))

    patch(Scheduler, "_preempt", preempted)
    patch(EngineCore, "_emit", emit)
