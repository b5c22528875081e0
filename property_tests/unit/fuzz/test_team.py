"""What becomes of a worker is heard of, whatever it was at."""

from __future__ import annotations

from pathlib import Path

from harness.fuzz.hunt import Settings
from harness.fuzz.team import Died, Process
from harness.fuzz.worker import Hunt


def test_a_worker_that_died_without_work_is_heard_of_when_it_is_given_some(tmp_path: Path) -> None:
    worker = Process("sim", Settings(), tmp_path / "stacks.txt")
    worker._process.kill()
    worker._process.join()
    worker.give(Hunt(0, 10))
    assert worker.hear() == Died(None, "was ended by signal 9 (SIGKILL)")
    worker.end()
