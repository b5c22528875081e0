"""Ctrl-C between two transactions, not in the middle of one: a log stays whole and says that it was interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Interrupts:
    """Whether the user has asked to stop."""

    def __init__(self) -> None:
        self.asked = False


@contextmanager
def held_back() -> Iterator[Interrupts]:
    """The first Ctrl-C is only noted; the second one interrupts at once, for an engine that hangs.

    Outside the main thread nothing changes, as Python delivers signals to the main thread alone; nor does it where Ctrl-C is
    ignored, as under nohup.
    """
    interrupts = Interrupts()
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is signal.SIG_IGN:
        yield interrupts
        return

    def note(signum: int, frame: object) -> None:
        interrupts.asked = True
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield interrupts
    finally:
        signal.signal(signal.SIGINT, before)
