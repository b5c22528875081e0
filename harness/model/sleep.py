"""What is asleep: memory that was given back, and the level that it was given back at."""

from __future__ import annotations

from collections.abc import Sequence

from harness.events import Tag

TAGS: tuple[Tag, ...] = ("kv_cache", "weights")
"""All that can sleep by itself, in alphabetical order."""

DROPPED = 2
"""From this level on the weights that wake are not those that fell asleep."""


class SleepState:
    """Level None: awake."""

    __slots__ = ("level", "tags")

    def __init__(self) -> None:
        self.level: int | None = None
        self.tags: tuple[Tag, ...] = ()
        """What is asleep; nothing at level 0, at which only scheduling sleeps."""

    def fall(self, level: int) -> int:
        """Sleep, or sleep again: what was woken since is given back, and the higher level counts. Returns that one."""
        self.level = level if self.level is None else max(self.level, level)
        self.tags = TAGS if self.level else ()
        return self.level

    def wake(self, tags: Sequence[Tag] | None) -> tuple[Tag, ...] | None:
        """Wake these, or all; returns those whose memory was mapped again, or None if nothing woke."""
        woken: tuple[Tag, ...] = self.tags if tags is None else tuple(tag for tag in self.tags if tag in tags)
        if not woken and (self.level is None or tags is not None):
            return None
        self.tags = tuple(tag for tag in self.tags if tag not in woken)
        if not self.tags:
            self.level = None
        return woken
