"""The same scenarios on a CUDA device: one path for both devices, the same promises, the same model.

With CAESURA_RECORD=FOLDER in the environment, the logs are kept there: property_tests/gpu/recorded/ was made so.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from harness.scenario import load_scenario
from harness.trial import run_trial

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")]

FILES = sorted((Path(__file__).parents[2] / "scenarios" / "modes").glob("*.yaml"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_a_scenario_holds_and_the_model_explains_it(file: Path, dtype: str, tmp_path: Path) -> None:
    from harness.backends.torch import TorchBackend

    scenario = load_scenario(file)
    # smollm2 comes from a package index, which a machine with a GPU need not reach.
    engine = scenario.engine.model_copy(update={"device": "cuda", "dtype": dtype, "checkpoint": "tiny"})
    backend = TorchBackend()
    info = backend.start(engine)
    trial = run_trial(replace(scenario, engine=engine), backend, info, tmp_path, explain=True)
    backend.stop()
    if record := os.environ.get("CAESURA_RECORD"):
        shutil.copy(tmp_path / "events.r0.jsonl", Path(record) / f"{file.stem}.{dtype}.jsonl")
    assert trial.verdict.status == "holds", trial.verdict
