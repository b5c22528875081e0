"""Judges a log straight from its file, stretches of steady steps at once: the verdict of stepping in less time and memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from harness.codec import Codec, Filled, Item, Retook, Stepped, Took
from harness.invariants.judge import Judge
from harness.log import take_lines
from harness.stretch import Stretch


class FileJudge:
    """Gives the lines of one file to a judge, first to last; its verdict is complete once `end` was called."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.codec = Codec()
        self._stretch: Stretch | None = None
        self._found = 0
        """Violations up to the last step."""

    def take(self, line: bytes) -> int:
        """Judge a line; returns its length.

        Raises:
            LogError: it cannot stand here.
        """
        _, _, items = self.codec.parse(line)
        for item in items:
            if type(item) is Stepped:
                self._step(item)
            elif isinstance(item, Took | Retook | Filled) and self._stretch is not None:
                self._beside(self._stretch, item)
            else:
                self.end()
                self._in_full(item)
        return len(line)

    def end(self) -> None:
        """Bring the replay up to date. Another line may follow."""
        if self._stretch is not None:
            self._stretch.end()
            self._stretch = None

    def _step(self, step: Stepped) -> None:
        stretch, judge = self._stretch, self.judge
        if stretch is not None and stretch.steady and judge.found == self._found:
            stretch.add(self.codec.seq, step.tokens)
            self.codec.pass_over(step)
            judge.steady(stretch)
            return
        self.end()
        self._found = judge.found
        self._in_full(step)
        if judge.found == self._found and judge.replay.steady:
            self._stretch = Stretch(judge.replay, judge.steady_for(judge.replay.last_batch))

    def _beside(self, stretch: Stretch, item: Took | Retook | Filled) -> None:
        """A request takes a block, or publishes one."""
        request = stretch.member(item.request)
        holders = 1 if isinstance(item, Filled) else 0
        if request is not None and self.judge.replay.blocks.references.get(item.block) != holders:
            request = None  # Others of the stretch may write to this block.
        if request is None:
            self.end()
        self._in_full(item)
        if request is not None and not isinstance(item, Filled):
            stretch.took_block(request)

    def _in_full(self, item: Item) -> None:
        seq = self.codec.seq
        for event in self.codec.expand(item):
            self.judge.apply(seq, event)
            seq += 1


def judge_file(path: Path, judge: Judge, *, progress: Callable[[int], object] = lambda length: None) -> None:
    """Feed a whole file to a judge; a torn last line is left out, and the log then has no end.

    Args:
        progress: called with the length of each line, in bytes.

    Raises:
        LogError: the message begins with file:line.
    """
    file = FileJudge(judge)
    for length in take_lines(path, file.codec, file.take):
        progress(length)
    file.end()
