"""Logs that were recorded on a GPU, judged again by today's invariants and explained again by today's model."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.log import read_log
from harness.trial import review

RECORDED = sorted((Path(__file__).parents[1] / "gpu" / "recorded").glob("*.jsonl"))


@pytest.mark.parametrize("file", RECORDED, ids=[file.stem for file in RECORDED])
def test_a_log_recorded_on_a_gpu_still_holds(file: Path) -> None:
    trial = review(read_log(file), None)
    assert trial.opened.device.startswith("NVIDIA"), trial.opened.device
    assert trial.verdict.status == "holds", trial.verdict
