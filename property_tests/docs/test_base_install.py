"""`pip install caesura-rl` alone, without torch, is enough to run, judge and replay scenarios on the model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCENARIO = ROOT / "scenarios" / "modes" / "keep_clear_new_weights.yaml"


@pytest.fixture(scope="module")
def base_install(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a virtual environment with the project and nothing that only an extra asks for."""
    venv = tmp_path_factory.mktemp("base-install") / "venv"
    subprocess.run([sys.executable, "-m", "venv", venv], check=True)
    install = [venv / "bin" / "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", ROOT]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return venv / "bin"


def call(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as a user would whose only Python is that environment."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize("library", ["torch", "transformers", "numpy", "hypothesis"])
def test_the_base_install_leaves_out_what_only_an_extra_needs(base_install: Path, tmp_path: Path, library: str):
    done = call(base_install / "python", "-c", f"import {library}", cwd=tmp_path)
    assert f"No module named '{library}'" in done.stderr


def test_the_base_install_runs_a_scenario_on_the_model_and_replays_its_log(base_install: Path, tmp_path: Path):
    run = call(base_install / "caesura", "run", SCENARIO, "--engine", "sim", cwd=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    replay = call(base_install / "caesura", "replay", "runs/latest", cwd=tmp_path)
    assert replay.returncode == 0, replay.stdout + replay.stderr


def test_asking_the_base_install_for_a_checkpoint_names_the_extra_to_install(base_install: Path, tmp_path: Path):
    done = call(base_install / "caesura", "checkpoint", "tiny", "tiny", cwd=tmp_path)
    assert done.returncode == 64, done.stdout + done.stderr
    assert "caesura-rl[engine]" in done.stderr
    assert not (tmp_path / "tiny").exists()
