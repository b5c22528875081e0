"""Real vLLM on a CUDA device, in lockstep: the model explains every event of every pause-mode scenario.

    CAESURA_RECORD=FOLDER pytest -m gpu property_tests/gpu/test_vllm_gpu.py

With CAESURA_RECORD the logs are kept: property_tests/gpu/recorded-vllm/ was made so. A scenario is run at its own shape with
attention of plain torch, and with vLLM's kernels on the next block size that these take.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from harness.scenario import load_scenario

from ..vllm.differences import BROKEN, DIFFERENCES, MODES, run, unreported, violated

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")]

KERNEL_BLOCK_SIZE = 16


@pytest.mark.parametrize("file", [*MODES, *DIFFERENCES], ids=lambda file: file.stem)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_vllm_is_explained_and_breaks_only_what_is_known(file: Path, dtype: str, scheduling: str, tmp_path: Path) -> None:
    size = load_scenario(file).engine.block_size
    if dtype == "bfloat16":
        size = -(-size // KERNEL_BLOCK_SIZE) * KERNEL_BLOCK_SIZE
    # smollm2 comes from a package index, which a machine with a GPU need not reach.
    fields = {"device": "cuda", "dtype": dtype, "checkpoint": "tiny", "block_size": size, "async_scheduling": scheduling == "async"}
    trial = run(file, "vllm", tmp_path, **fields)
    if record := os.environ.get("CAESURA_RECORD"):
        shutil.copy(tmp_path / "events.r0.jsonl", Path(record) / f"{file.stem}.{dtype}.{scheduling}.jsonl")
    explanation = trial.verdict.explanation
    assert explanation is not None and explanation.mismatch is None, explanation
    assert violated(trial) <= BROKEN | unreported(trial.opened.profile)
