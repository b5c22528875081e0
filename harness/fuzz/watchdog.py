"""Interrupts an engine that does not come back, so that a hang is a finding like any other."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class EngineHangs(BaseException):
    """Raised inside the call that does not return. No `Exception`: an engine that catches those must not swallow it."""


@contextmanager
def watched(limit_s: float | None) -> Iterator[None]:
    """Raise EngineHangs in the block once it has taken `limit_s` seconds; None: never.

    It interrupts Python code and waits for locks in the main thread of a process; elsewhere there are no signals, and
    nothing is watched. Code that never returns to Python is what a campaign kills a worker for.
    """
    if limit_s is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, _interrupt)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise EngineHangs
