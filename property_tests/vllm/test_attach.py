"""docs/attach.md, done: a server that records, a loop that knows nothing of us, a verdict."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.log import read_log
from harness.trial import review

from .servers import serving

LOOP = Path(__file__).parents[2] / "examples" / "attach_loop.py"
SHAPE = "--dtype float32 --enforce-eager --max-model-len 256 --max-num-seqs 8 --block-size 32"
RECORDER = "--served-model-name policy --scheduler-cls harness.backends.vllm.Recorder"


def test_a_loop_that_knows_nothing_of_us_gets_a_verdict(needs_vllm, tmp_path, request):
    if not request.config.getoption("--long", default=False):
        pytest.skip("with --long: a server takes half a minute to start")
    from harness.tracer.checkpoint import make_tracer

    make_tracer(tmp_path / "policy", versions=3)
    with serving(tmp_path / "policy" / "v1", f"{RECORDER} {SHAPE}", {"CAESURA_LOG": str(tmp_path / "logs")}) as url:
        checkpoints = [str(tmp_path / "policy" / version) for version in ("v2", "v3")]
        loop = subprocess.run([sys.executable, LOOP, url, *checkpoints], capture_output=True, text=True, timeout=120)
        assert loop.returncode == 0, loop.stderr
    (run,) = (tmp_path / "logs").iterdir()
    log = read_log(run)
    assert log.closed
    trial = review(log, None)
    assert trial.verdict.explanation.mismatch is None
    assert {judgement.invariant for judgement in trial.verdict.judgements if judgement.status == "violated"} == set()
    assert "request-across-boundary" in trial.coverage
    assert "recomputed-by-new-weights" in trial.coverage
