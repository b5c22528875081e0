"""The model as an engine that runs by itself: an asyncio task that makes steps, with clients beside it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from harness.backends import Answer, CallRefused, EngineInfo, opened_event
from harness.backends.sim import SimBackend
from harness.events import Called, Delivered, Event, Finished, Output, Returned
from harness.live import RankLog
from harness.log import read_log
from harness.operations import Operation, Submit, to_data
from harness.scenario import EngineShape, load_scenario
from harness.trial import Trial, run_live_trial

Hear = Callable[[Sequence[Output]], None]


class SimLive:
    """Its methods `hand_out`, `answer` and `refuse` are what a test of a faulty engine overrides."""

    name = "sim-live"

    def __init__(self, *, level: int = 2, step_s: float = 0.001) -> None:
        self.level = level
        self._step_s = step_s

    async def start(self, shape: EngineShape, folder: Path) -> EngineInfo:
        self._sim = SimBackend()
        info = self._sim.start(shape)
        opened = opened_event(shape, self, info, digest="", seed=0, clock_base_ns=time.monotonic_ns())
        self._log = RankLog(folder, opened) if self.level else None
        self._ops = 0
        self._calls: dict[int, asyncio.Future[Answer]] = {}
        self._clients: dict[str, tuple[int, Hear]] = {}
        self._ended: dict[str, Finished] = {}
        self._loop = asyncio.create_task(self._run())
        return info

    def tokenize(self, text: str) -> tuple[int, ...]:
        return self._sim.tokenize(text)

    def cannot(self, operation: Operation) -> str | None:
        return None

    async def call(self, operation: Operation, heard: Hear) -> Answer:
        op, self._ops = self._ops, self._ops + 1
        answer = self._calls[op] = asyncio.get_running_loop().create_future()
        if isinstance(operation, Submit):
            self._clients.setdefault(operation.id, (op, heard))
        self._tell([Called(op=op, operation=to_data(operation), by="client"), *self._sim.apply(op, operation)])
        return await answer

    async def end(self, why: str) -> None:
        if self._log is not None:
            self._log.close(why)

    async def stop(self) -> None:
        self._loop.cancel()
        with suppress(asyncio.CancelledError):
            await self._loop

    async def _run(self) -> None:
        while True:
            if self._sim.has_work():
                self._tell(self._sim.step())
            await asyncio.sleep(self._step_s)

    def _tell(self, events: Sequence[Event]) -> None:
        if self._log is not None:
            self._log.append(time.monotonic_ns(), events)
        submits = {event.op for event in events if isinstance(event, Called) and "submit" in event.operation}
        for event in events:
            match event:
                case Finished(request=request):
                    self._ended[request] = event
                case Delivered(outputs=outputs):
                    self.hand_out(outputs)
                case Returned(op=op, answer=dict(content)) if op not in submits:
                    self.answer(op, content)
                case Returned(op=op, error=error) if error is not None:
                    self._clients = {id: client for id, client in self._clients.items() if client[0] != op}
                    self.refuse(op, CallRefused(error.code, error.message))
                case _:
                    pass

    def hand_out(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            op, heard = self._clients[output.request]
            heard([output])
            if output.finish_reason is not None:
                del self._clients[output.request]
                self.answer(op, self.ending(self._ended.pop(output.request)))

    def ending(self, finished: Finished) -> dict[str, Any]:
        return {
            "finish_reason": finished.reason,
            "prompt_tokens": finished.prompt_tokens,
            "output_tokens": finished.output_tokens,
            "weight_versions": [list(span) for span in finished.spans],
        }

    def answer(self, op: int, content: dict[str, Any]) -> None:
        if not self._calls[op].done():
            self._calls[op].set_result(Answer(content))

    def refuse(self, op: int, refused: CallRefused) -> None:
        self._calls[op].set_exception(refused)


def run_live(folder: Path, timeline: str, engine: SimLive | None = None, *, head: str = "", bound_ms: float = 10_000) -> Trial:
    """Run a timeline on a live engine in a new folder and judge its logs."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "scenario.yaml"
    file.write_text(f"schema: 1\nname: live\n{head}bound_ms: {bound_ms}\ntimeline:\n{timeline}")

    async def run() -> Trial:
        backend = engine or SimLive()
        try:
            return await run_live_trial(load_scenario(file), backend, folder)
        finally:
            await backend.stop()

    return asyncio.run(run())


def events_of(folder: Path, writer: str) -> list[Event]:
    """One writer's events in their places in the merged log."""
    return [entry.event for entry in read_log(folder).entries if entry.writer == writer]
