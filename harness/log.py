"""The append-only event log: written a line at a time, read back whole, in part, or merged.

Every verdict is a function of a log, so a log must say no more and no less than
what happened: a killed process loses nothing that was appended, a torn tail is
reported and left out, and anything else that is wrong is an error with its file
and line. docs/log.md describes the format, codec.py encodes a line.
"""

from __future__ import annotations

import gc
import heapq
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from harness.codec import Codec, Decode, LogError
from harness.events import Closed, Entry, Event, Opened

__all__ = ["Log", "LogError", "LogWriter", "TornTail", "iter_file", "log_files", "read_log", "take_lines"]

Taken = TypeVar("Taken")

_WRITER = re.compile(r"[A-Za-z0-9_-]+")
_FILE_NAME = re.compile(rf"events\.({_WRITER.pattern})\.jsonl")


class LogWriter:
    """Appends one writer's events to `events.<writer>.jsonl` in a run folder, which is made if it is not there.

    Each append is one write of one whole line to the operating system: once it has returned, the
    events survive the death of the process (not that of the machine: nothing is synced to disk).
    Not for use by several threads.

    Raises:
        LogError: the folder cannot be written, or holds a log of this writer: none is ever overwritten.
    """

    def __init__(self, folder: Path, writer: str = "r0") -> None:
        if not _WRITER.fullmatch(writer):
            raise LogError(f"expected a writer's name of letters, digits, _ and -, got {writer!r}")
        self.path = folder / f"events.{writer}.jsonl"
        self._codec = Codec()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("xb", buffering=0)
        except OSError as error:
            if self.path.exists():
                raise LogError(f"{self.path} exists and a log is never overwritten: give the run a new folder") from None
            raise LogError(f"cannot write a log to {folder}: {error.strerror}") from error

    @property
    def seq(self) -> int:
        """Number of the next event; how many were appended."""
        return self._codec.seq

    def append(self, t_ns: int, events: Sequence[Event | Decode]) -> int:
        """Append what happened together at `t_ns`, as one line; no events, no line. Steps may be told in columns.

        Returns:
            The number of the first of `events`.

        Raises:
            LogError: the disk is full, the writer is closed, an event cannot stand here or cannot be
                encoded. The writer is closed from then on, so that what it could not write is at
                most the end of the file, never its middle.
        """
        if self._file.closed:
            raise LogError(f"{self.path}: the writer is closed")
        seq = self._codec.seq
        if not events:
            return seq
        try:
            line = self._codec.encode(t_ns, events)
            written = self._file.write(line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes could be written: is the disk full?")
        except (OSError, TypeError, ValueError) as error:
            self.close()
            raise LogError(f"{self.path}: cannot append event {seq}: {error}") from error
        except BaseException:  # an interrupt may have come after the codec took note and before the write
            self.close()
            raise
        return seq

    def close(self) -> None:
        """Close the file. It appends nothing: that the run ended well is said by a `closed` event."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class TornTail(NamedTuple):
    """The incomplete last line of a file whose writer died in the middle of it: left out, not guessed at."""

    path: Path
    offset: int
    """Bytes before it."""
    dropped: bytes

    def __str__(self) -> str:
        return f"{self.path}: the last {len(self.dropped)} bytes, from byte {self.offset} on, are half a line and were left out"


@dataclass(frozen=True, kw_only=True)
class Log:
    """A log in memory, never without its first event."""

    entries: list[Entry]
    """`seq` is each one's index in this list."""
    opened: Opened
    """The first event; of a merged log that of the writer that shows most."""
    closed: bool
    """Every writer closed its file."""
    tails: tuple[TornTail, ...]
    """What was left out, at most one for each file."""

    @property
    def torn(self) -> TornTail | None:
        """The first torn tail, None if every line is whole."""
        return self.tails[0] if self.tails else None


def read_log(path: Path) -> Log:
    """Read one file, or all `events.*.jsonl` of a run folder merged by time, writer and number.

    Times of a merged log count from the clock base of the writer whose clock began first.

    Raises:
        LogError: no log there, or one that says something impossible; the message begins with file:line.
    """
    files = log_files(path)
    tails: list[TornTail] = []
    with _cycle_collection_off():
        entries = _merged([list(_iter_noting_tail(file, tails)) for file in files])
    if not entries:
        raise LogError(f"{tails[0].path}:1: expected a line with `opened`, got half a line: its writer died before one was complete")
    opened = max((entry.event for entry in entries if isinstance(entry.event, Opened)), key=lambda opened: opened.level)
    closed = sum(type(entry.event) is Closed for entry in entries) == len(files)
    return Log(entries=entries, opened=opened, closed=closed, tails=tuple(tails))


def iter_file(path: Path) -> Generator[Entry, None, TornTail | None]:
    """Read one file line by line, for logs that are larger than memory.

    Returns:
        What was left out at the end, as the generator's return value (`tail = yield from iter_file(path)`).

    Raises:
        LogError: the message begins with file:line.
    """
    writer = match[1] if (match := _FILE_NAME.fullmatch(path.name)) else path.stem
    codec = Codec()
    lines = take_lines(path, codec, codec.decode)
    while True:
        try:
            seq, t_ns, events = next(lines)
        except StopIteration as end:
            return end.value
        for place, event in enumerate(events, start=seq):
            yield Entry(place, t_ns, writer, event)


def take_lines(path: Path, codec: Codec, take: Callable[[bytes], Taken]) -> Generator[Taken, None, TornTail | None]:
    """What `take` makes of each line of a file; it reads them with `codec`.

    Returns, Raises:
        As `iter_file`.
    """
    offset = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if codec.closed:
                    raise LogError(f"{path}:{number}: expected nothing after `closed`, got {len(line)} bytes")
                if not line.endswith(b"\n"):
                    return TornTail(path, offset, line)
                try:
                    taken = take(line)
                except LogError as error:
                    raise LogError(f"{path}:{number}: {error}") from None
                yield taken
                offset += len(line)
    except OSError as error:
        raise LogError(f"cannot read {path}: {error.strerror}") from error
    if offset == 0:
        raise LogError(f"{path}:1: expected a line with `opened`, got an empty file")
    return None


def log_files(path: Path) -> list[Path]:
    """The file itself, or the `events.*.jsonl` of a run folder, sorted by name.

    Raises:
        LogError: a folder without any.
    """
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if _FILE_NAME.fullmatch(file.name))
    if not files:
        raise LogError(f"no log in {path}: expected files named events.<writer>.jsonl")
    return files


def _merged(logs: Sequence[list[Entry]]) -> list[Entry]:
    """Of several writers' logs, those that have a first event, on one clock and numbered anew."""
    if len(logs) == 1:
        return logs[0]
    logs = [log for log in logs if log]
    bases = [_opened(log).clock_base_ns for log in logs]
    shifted = (
        [entry._replace(t_ns=entry.t_ns + base - min(bases)) for entry in log] if base > min(bases) else log
        for log, base in zip(logs, bases, strict=True)
    )
    return [entry._replace(seq=place) for place, entry in enumerate(heapq.merge(*shifted, key=_merge_key))]


def _opened(log: Sequence[Entry]) -> Opened:
    opened = log[0].event
    assert isinstance(opened, Opened), opened  # the codec lets no file begin with anything else
    return opened


def _merge_key(entry: Entry) -> tuple[int, str, int]:
    return entry.t_ns, entry.writer, entry.seq


def _iter_noting_tail(path: Path, tails: list[TornTail]) -> Generator[Entry, None, None]:
    if (tail := (yield from iter_file(path))) is not None:
        tails.append(tail)


@contextmanager
def _cycle_collection_off() -> Iterator[None]:
    """Events hold no cycles, and looking for some in all those read so far, again and again, would take two thirds of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
