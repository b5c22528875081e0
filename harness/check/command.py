"""What `caesura check` does once its arguments are parsed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import httpx

from harness.backends import EngineInfo, opened_event
from harness.backends.http import HttpBackend
from harness.check.inspection import Found, Inspection
from harness.check.promise import CHECKS
from harness.check.stage import Record
from harness.check.tracing import find_folders
from harness.errors import BadInput
from harness.events import Closed, Event
from harness.log import LogWriter
from harness.runs import REPORT, RunFolder
from harness.scenario import EngineShape
from harness.scenario_source import suggestion
from harness.trial import EXIT_CODES, Status
from reports import check as page


class Asked(NamedTuple):
    """The options of the verb."""

    key: str | None
    timeout_s: float
    tracer: Path | None
    foreign_traffic_ok: bool
    require: Sequence[str]
    only: Sequence[str]
    runs: Path
    as_json: bool


def check(url: str, asked: Asked) -> int:
    """Put the server to every promise; the exit code is the verdict's.

    Raises:
        BadInput: it cannot be checked, or not with these options; the message says why and what to do.
        KeyboardInterrupt: stopped, with the server left as it was found.
    """
    for name in (*asked.require, *asked.only):
        if name not in CHECKS:
            raise BadInput(f"{name}: there is no such check{suggestion(name, CHECKS)} expected one of {', '.join(CHECKS)}")
    folders = find_folders(asked.tracer) if asked.tracer is not None else {}
    backend = HttpBackend(url, key=asked.key, timeout_s=asked.timeout_s)
    recording = _Recording(asked.runs, httpx.URL(url).host)
    inspection = Inspection(
        backend, timeout_s=asked.timeout_s, folders=folders, foreign_traffic_ok=asked.foreign_traffic_ok, only=asked.only
    )

    async def inspect() -> Found:
        try:
            return await inspection.run(recording.open, lambda row: None if asked.as_json else print(page.row(row), flush=True))
        finally:
            await backend.stop()

    try:
        found = asyncio.run(inspect())
    except (KeyboardInterrupt, asyncio.CancelledError):  # Ctrl-C, SIGTERM
        recording.close("interrupted")
        raise KeyboardInterrupt from None
    except BadInput as error:
        recording.close("crashed", str(error))
        raise
    recording.close("drained")
    return _report(found, url, asked, recording.folder)


def _report(found: Found, url: str, asked: Asked, folder: RunFolder) -> int:
    status = verdict(found, asked.require)
    if asked.as_json:
        print(page.as_json(found, url, status, folder.path), flush=True)
    else:
        print(page.summary(found, url, status, asked.require, folder.path), end="", flush=True)
    folder.write(REPORT, "".join(page.row(row) + "\n" for row in found.rows) + page.summary(found, url, status, asked.require, folder.path))
    folder.publish()
    return EXIT_CODES[status]


def verdict(found: Found, require: Sequence[str]) -> Status:
    """Violated counts before unknown before holds. What could not be checked counts if it was required, or if nothing could be."""
    if found.left or any(row.verdict == "violated" for row in found.rows):
        return "violated"
    unseen = {row.id for row in found.rows if row.verdict == "not-checkable"}
    if found.stopped or unseen.intersection(require) or len(unseen) == len(found.rows):
        return "unknown"
    return "holds"


class _Recording:
    """What the client saw, as a log of level 0 in a run folder of its own, made when it is known who is there."""

    def __init__(self, runs: Path, host: str) -> None:
        self._runs = runs
        self._host = host
        self._log: LogWriter | None = None
        self._base_ns = 0

    @property
    def folder(self) -> RunFolder:
        assert self._log is not None, "nothing was recorded"
        return RunFolder(self._log.path.parent)

    def open(self, backend: HttpBackend, info: EngineInfo) -> Record:
        folder = RunFolder.make(self._runs, f"check-{self._host}")
        self._log = LogWriter(folder.path, "client")
        self._base_ns = time.monotonic_ns()
        card = backend.dialect.card
        shape = EngineShape(checkpoint=card.root, max_model_len=card.max_model_len)
        self._append(opened_event(shape, backend, info, digest="", seed=0, clock_base_ns=self._base_ns))
        return self._append

    def close(self, why: str, error: str = "") -> None:
        if self._log is not None:
            self._append(Closed(why=why, count=self._log.seq, error=error))
            self._log.close()

    def _append(self, event: Event) -> None:
        assert self._log is not None
        self._log.append(time.monotonic_ns() - self._base_ns, [event])
