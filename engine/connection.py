"""How AsyncLLM and the loop of the core reach each other; here, when both live in one process.

Calls arrive in the order in which they were sent, and so do reports. A `Connection` is AsyncLLM's end and
belongs to one event loop, a `Port` is the core's end and belongs to one thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import NamedTuple, Protocol

from .config import EngineConfig
from .messages import Call, Report

Buffer = bytes | bytearray | memoryview


class ObserverFactory(NamedTuple):
    """Where the core's observer comes from: it is made where the core lives, which may be another process."""

    path: str
    """`module:callable`, which returns an `engine.Observer`."""
    arguments: dict[str, object] = {}  # noqa: RUF012 - never changed
    """Keyword arguments: numbers, strings, lists and mappings of such."""


class SentCall(NamedTuple):
    call: Call
    buffers: Sequence[Buffer] = ()
    """What its tensors hold."""


class Port(Protocol):
    """The core's end."""

    def take(self, *, wait: bool) -> list[SentCall]:
        """The calls that have arrived; with `wait`, at least one."""
        ...

    def send(self, report: Report) -> None: ...


class Connection(Protocol):
    """AsyncLLM's end. The last report is `Stopped`, whatever became of the core."""

    def send(self, call: Call, buffers: Sequence[Buffer] = ()) -> None:
        """Send a call; never waits."""
        ...

    def receive(self, timeout_s: float | None = 0) -> Report | None:
        """The next report; None if none comes in time (None: however long it takes)."""
        ...

    def notify(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        """Have `loop` call `arrived` when there may be reports to receive."""
        ...

    def close(self, timeout_s: float) -> None:
        """Wait until the core is gone, for so long, then see to it."""
        ...


class ThreadConnection:
    """A connection to a core in a thread of its own, which runs `serve(config, observer, port)`."""

    def __init__(
        self,
        serve: Callable[[EngineConfig, ObserverFactory | None, Port], None],
        config: EngineConfig,
        observer: ObserverFactory | None,
    ) -> None:
        self._port = _ThreadPort()
        # A daemon, as a program that ends without a shutdown must not wait for an engine that waits for calls.
        self._thread = Thread(target=serve, args=(config, observer, self._port), name="engine core", daemon=True)
        self._thread.start()

    def send(self, call: Call, buffers: Sequence[Buffer] = ()) -> None:
        self._port.calls.put(SentCall(call, buffers))

    def receive(self, timeout_s: float | None = 0) -> Report | None:
        with suppress(Empty):
            return self._port.reports.get(block=timeout_s != 0, timeout=timeout_s)
        return None

    def notify(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        def wake() -> None:
            with suppress(RuntimeError):  # the event loop is closed: nobody listens any more
                loop.call_soon_threadsafe(arrived)

        self._port.wake = wake
        wake()

    def close(self, timeout_s: float) -> None:
        """A thread that is still in a step by then is left behind: it ends with the process."""
        self._thread.join(timeout_s)


class _ThreadPort:
    def __init__(self) -> None:
        self.calls: SimpleQueue[SentCall] = SimpleQueue()
        self.reports: SimpleQueue[Report] = SimpleQueue()
        self.wake: Callable[[], None] = lambda: None

    def take(self, *, wait: bool) -> list[SentCall]:
        taken = [self.calls.get()] if wait else []
        with suppress(Empty):
            while True:
                taken.append(self.calls.get_nowait())
        return taken

    def send(self, report: Report) -> None:
        self.reports.put(report)
        self.wake()
