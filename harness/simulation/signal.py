"""Something that happens again and again, and that processes wait for."""

from __future__ import annotations

import simpy


class Signal:
    """Each `wait()` ends when it happens next."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._next = env.event()

    def wait(self) -> simpy.Event:
        return self._next

    def fire(self) -> None:
        """It happens now: everyone who waits goes on, in any order."""
        if self._next.callbacks:
            fired, self._next = self._next, self._env.event()
            fired.succeed()
