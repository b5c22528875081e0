"""A reset takes what follows for late though nothing is in flight: the first token after the resume is lost, the output moves on by one."""

from __future__ import annotations

from typing import Any

from harness.faults.fault import Patch

STANDS_FOR = "vllm#42043"
CAUGHT_BY = "token-conservation"
SHALLOW = False
ENGINE = {"async_scheduling": True}


def plant(patch: Patch) -> None:
    from engine.core import EngineCore
    from engine.request import Request
    from engine.scheduler import Scheduler

    preempt_all, right = Scheduler.preempt_all, EngineCore._emit

    def marked(self: Scheduler) -> None:
        for request in self.running:
            vars(request)["discard"] = True
        preempt_all(self)

    def emit(self: EngineCore, request: Request, tokens: Any, reason: Any) -> None:
        if tokens and vars(request).pop("discard", False):
            vars(request)["lost"] = vars(request).get("lost", 0) + 1
            return
        right(self, request, tokens, reason)
        output = self._outputs[-1]
        self._outputs[-1] = output._replace(first=output.first - vars(request).get("lost", 0))

    patch(Scheduler, "preempt_all", marked)
    patch(EngineCore, "_emit", emit)
