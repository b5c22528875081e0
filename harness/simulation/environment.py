"""Virtual time: simpy's, in whole nanoseconds, with a seeded choice among what happens at one instant.

By itself simpy runs simultaneous events in the order in which they were scheduled: of the 24 orders in which four
processes may act at one instant it only ever runs one, and a race between them is never seen.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from heapq import heappush
from typing import Any

import simpy
from simpy.events import NORMAL, EventPriority

Process = Generator[simpy.Event, Any, None]
"""What a process is written as: it yields what it waits for, and gets that event's value."""


class Environment(simpy.Environment):
    """Simultaneous events of one priority happen in an order that `ties` chooses; every order has a chance.

    The choice is a random key that each event gets as it is scheduled, in the place of simpy's running number. It needs no
    event of its own in the log: what processes do at one instant stands there in the order in which they did it, each
    call with the name of its process.
    """

    def __init__(self, ties: random.Random) -> None:
        super().__init__(initial_time=0)
        self._ties = ties

    def schedule(self, event: simpy.Event, priority: EventPriority = NORMAL, delay: float = 0) -> None:
        key = (self._ties.getrandbits(32), next(self._eid))  # the running number decides between equal keys
        heappush(self._queue, (self._now + delay, priority, key, event))  # type: ignore[arg-type]

    @property
    def now_ns(self) -> int:
        """The time. It is a whole number because every delay is."""
        return int(self.now)
