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

    def take(self, line: bytes) -> int:
        """Judge a line; returns its length.

        Raises:
            LogError: it cannot stand here.
        """
        _, _, items = self.codec.parse(line)
        for item in items:
            if isinstance(item, Stepped):
                self._step(item)
            elif isinstance(item, (Took, Retook)):
                self._take(item)
            elif isinstance(item, Filled):
                self._publish(item)
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
        if stretch is not None and stretch.steady:
            stretch.add(self.codec.seq, step.tokens)
            self.codec.pass_over(step)
            judge.stepped(stretch)
            return
        self.end()
        found = judge.found
        self._in_full(step)
        if judge.found == found and judge.replay.steady:
            self._stretch = Stretch(judge.replay, judge.steady_for(judge.replay.last_batch))

    def _take(self, item: Took | Retook) -> None:
        """A request takes a block."""
        stretch = self._stretch
        if stretch is None or not stretch.may_take(item.request, item.block, evicts=isinstance(item, Retook)):
            self.end()
            self._in_full(item)
        elif isinstance(item, Retook):
            self._in_full(item)
            stretch.took()
        else:
            self.codec.pass_over(item)
            stretch.take(item.request, item.block)

    def _publish(self, item: Filled) -> None:
        """A request publishes a block."""
        stretch, codec = self._stretch, self.codec
        if stretch is None or not stretch.may_publish(item.request, item.block):
            self.end()
            self._in_full(item)
            return
        seq, label = codec.seq, codec.next_label
        codec.pass_over(item)
        self.judge.published(seq, *stretch.publish(item.request, item.block, label), label)

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
