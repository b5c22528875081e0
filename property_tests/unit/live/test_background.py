"""A log that is written in the background: nothing is lost of it, and no disk holds its engine up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from harness.events import SCHEMA, Accepted, Closed, Opened
from harness.live import background
from harness.live.background import BackgroundWriter
from harness.log import LogError, LogWriter, read_log

OPENED = Opened(
    schema=SCHEMA,
    caesura="0.1.0",
    backend="sim",
    versions={},
    level=2,
    device="cpu",
    engine={},
    profile="caesura",
    eos_token_ids=(),
    scenario="",
    seed=0,
    clock_base_ns=0,
    rank=0,
)
BOUND_S = 10


class Disk(LogWriter):
    """One that does with a line what it is told to."""

    def __init__(self, folder: Path, before_each: Callable[[], None]) -> None:
        super().__init__(folder)
        self._before_each = before_each

    def append(self, t_ns, events) -> int:
        self._before_each()
        return super().append(t_ns, events)


def nothing_fails(error: Exception) -> None:
    raise AssertionError("told of a failure") from error


def test_what_was_appended_is_there_in_its_order_once_drained(tmp_path: Path) -> None:
    log = BackgroundWriter(LogWriter(tmp_path), nothing_fails)
    log.append(0, [OPENED])
    for number in range(1000):
        log.append(number, [Accepted(request=f"r{number}", parked=False)])
    writer = log.drained()
    assert log.waiting == 0
    writer.append(1000, [Closed(why="drained", count=writer.seq)])
    writer.close()
    read = read_log(tmp_path)
    assert read.closed
    accepted = [entry.event for entry in read.entries[1:-1]]
    assert accepted == [Accepted(request=f"r{number}", parked=False) for number in range(1000)]


def test_a_file_is_closed_behind_what_still_waited(tmp_path: Path) -> None:
    held = threading.Event()
    log = BackgroundWriter(Disk(tmp_path, lambda: held.wait(BOUND_S) and None), nothing_fails)
    log.append(0, [OPENED])
    log.append(1, [Accepted(request="r0", parked=False)])
    log.close()
    held.set()
    log._thread.join(BOUND_S)
    assert [entry.event for entry in read_log(tmp_path).entries] == [OPENED, Accepted(request="r0", parked=False)]


def test_a_disk_that_fails_is_told_once_and_the_engine_goes_on(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError("no space left")

    told: list[Exception] = []
    log = BackgroundWriter(Disk(tmp_path, fail), told.append)
    for t_ns in range(3):
        log.append(t_ns, [OPENED])
    log._thread.join(BOUND_S)
    assert [str(error) for error in told] == ["no space left"]


def test_a_disk_that_hangs_fills_no_memory_and_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "MOST_WAITING", 50)
    monkeypatch.setattr(background, "DRAIN_S", 0.05)
    held = threading.Event()
    log = BackgroundWriter(Disk(tmp_path, lambda: held.wait(BOUND_S) and None), nothing_fails)
    with pytest.raises(LogError, match="the disk does not keep up, 50 transactions wait"):
        for t_ns in range(60):
            log.append(t_ns, [OPENED] if t_ns == 0 else [Accepted(request=f"r{t_ns}", parked=False)])
    log.close()
    log.drained()
    assert log._thread.is_alive(), "nobody waited for the disk"
    held.set()
    log._thread.join(BOUND_S)
    assert len(read_log(tmp_path).entries) == 50
