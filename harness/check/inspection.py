"""A server put to every promise, one after the other, and left as it was found: also on Ctrl-C, also when something breaks."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from harness.backends import BackendError, CallRefused, EngineInfo
from harness.backends.http import BrokenProtocol, HttpBackend, NoAnswer, Unreachable
from harness.check import arguments, caches, meeting, pauses, versions, waiting, weights, whole
from harness.check.promise import CHECKS, Broken, Check, NotCheckable, Row
from harness.check.stage import ForeignTraffic, Record, Stage
from harness.check.tracing import recognise
from harness.operations import WeightSource
from harness.scenario import EngineShape

FAMILIES = (pauses, meeting, waiting, versions, caches, arguments, weights, whole)
"""Where checks are, in the order in which they are made."""
SAMPLE_TOKENS = 24
"""Generated before the checks, to learn how long a token takes and whether it is a tracer's."""
LISTEN_S = 0.5
"""For how long it is watched whether somebody else uses the server."""


class Found(NamedTuple):
    """The server, as far as it was inspected."""

    dialect: str
    versions: dict[str, str]
    model: str
    tracer: str | None
    """The version that was served, if the checkpoint is a tracer."""
    rows: list[Row]
    left: list[str]
    """What could not be brought back, a sentence each."""
    stopped: str | None
    """Why not all checks were made."""
    seconds: float


class Inspection:
    """One `caesura check`.

    Args:
        folders: versions of a tracer that the server can find under these paths.
        foreign_traffic_ok: somebody else may be using the server, and may lose requests.
        only: ids of the checks to make; none: all.
    """

    def __init__(
        self,
        backend: HttpBackend,
        *,
        timeout_s: float = 10.0,
        folders: Mapping[str, Path] = MappingProxyType({}),
        foreign_traffic_ok: bool = False,
        only: Collection[str] = (),
    ) -> None:
        self._backend = backend
        self._timeout_s = timeout_s
        self._folders = folders
        self._foreign_traffic_ok = foreign_traffic_ok
        self._only = only
        self._rows: list[Row] = []
        self._stopped: str | None = None

    async def run(self, opened: Callable[[HttpBackend, EngineInfo], Record], progress: Callable[[Row], None]) -> Found:
        """Every check. `opened` makes the log once it is known who is there; `progress` hears each row.

        Raises:
            BackendError: the server cannot be checked: unreachable, no control plane, paused, in use, not that tracer.
            asyncio.CancelledError: after the server was left as it was found.
        """
        began = time.monotonic()
        info = await self._backend.start(EngineShape(), Path())
        await self._refuse_foreign_traffic()
        stage = Stage(self._backend, opened(self._backend, info), bound_s=self._timeout_s, alone=not self._foreign_traffic_ok)
        left: list[str] = []
        try:
            with _sigterm_cancels():
                await self._sample(stage)
                await self._make_checks(stage, progress)
        finally:
            left = await asyncio.shield(_leave(stage))
        card = self._backend.dialect.card
        tracer = stage.tracing.version if stage.tracing else None
        seconds = time.monotonic() - began
        return Found(self._backend.dialect.name, card.versions, card.model, tracer, self._rows, left, self._stopped, seconds)

    async def _refuse_foreign_traffic(self) -> None:
        if self._foreign_traffic_ok:
            return
        stage = Stage(self._backend, lambda event: None, bound_s=self._timeout_s, alone=True)
        deadline = time.monotonic() + LISTEN_S
        while time.monotonic() < deadline:
            count = (await stage.metrics()).requests
            if count is None:
                raise BackendError(
                    f"whether anybody else uses {self._backend.client.url} cannot be seen: /metrics counts no requests; "
                    "say --foreign-traffic-ok if nobody does, or if their requests may be lost"
                )
            if count:
                raise BackendError(
                    f"{self._backend.client.url} has {count:g} requests that are not ours, and a check pauses and aborts: "
                    "try again when it is idle, or say --foreign-traffic-ok"
                )
            await asyncio.sleep(LISTEN_S / 5)

    async def _sample(self, stage: Stage) -> None:
        """How fast it is, and whether its tokens are a tracer's."""
        try:
            await stage.complete(max_tokens=2)
            request = stage.start(max_tokens=SAMPLE_TOKENS)
            await stage.heard(request, 1)
            first_s = request.last_heard_s
            await stage.over(request)
            stage.expect_complete(request)
        except (Broken, CallRefused, BrokenProtocol) as error:
            raise BackendError(f"{self._backend.client.url} does not serve a plain request: {error}") from None
        stage.token_s = max(1e-4, (request.last_heard_s - first_s) / (len(request.tokens) - 1))
        stage.tracing = recognise(request.prompt, request.tokens, self._folders)
        if stage.tracing is not None and (folder := self._folders.get(stage.tracing.version)) is not None:
            self._backend.original = WeightSource(checkpoint=str(folder))

    async def _make_checks(self, stage: Stage, progress: Callable[[Row], None]) -> None:
        order = [family.__name__ for family in FAMILIES]
        asked = [check for check in CHECKS.values() if not self._only or check.id in self._only]
        for check in sorted(asked, key=lambda check: order.index(check.judge.__module__)):
            row = self._skipped(check) if self._stopped else await self._make(check, stage)
            self._rows.append(row)
            progress(row)

    async def _make(self, check: Check, stage: Stage) -> Row:
        try:
            row = await _judge(check, stage)
            await stage.clear_up()
        except Unreachable as error:
            self._stopped = f"the server went away during {check.id}: {error}"
            return Row(check.id, check.promise, "violated", str(error))
        except Broken as error:
            self._stopped = f"after {check.id} the server could not be brought back to where it was: {error}"
            return Row(check.id, check.promise, "violated", self._stopped)
        except ForeignTraffic as error:
            self._stopped = f"after {check.id}: {error}"
        return row

    def _skipped(self, check: Check) -> Row:
        return Row(check.id, check.promise, "not-checkable", "not tried: the inspection had stopped")


@contextmanager
def _sigterm_cancels() -> Iterator[None]:
    """SIGTERM ends the inspection as Ctrl-C does, which asyncio sees to itself; where signals are not ours to handle, nothing changes."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    try:
        loop.add_signal_handler(signal.SIGTERM, task.cancel)
    except (ValueError, RuntimeError):  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


async def _judge(check: Check, stage: Stage) -> Row:
    try:
        return Row(check.id, check.promise, "holds", await check.judge(stage))
    except NotCheckable as reason:
        return Row(check.id, check.promise, "not-checkable", str(reason))
    except (Broken, CallRefused, NoAnswer, BrokenProtocol, TimeoutError) as error:
        return Row(check.id, check.promise, "violated", str(error) or type(error).__name__)


async def _leave(stage: Stage) -> list[str]:
    """Bring everything back; what could not be."""
    try:
        await stage.clear_up()
    except ForeignTraffic:
        return []
    except (Broken, Unreachable) as error:
        return [str(error)]
    return []
