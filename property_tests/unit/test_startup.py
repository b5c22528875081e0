"""The command line starts without the libraries of any engine: it must run beside one, and on a laptop."""

from __future__ import annotations

import subprocess
import sys

ENGINE_LIBRARIES = {"engine", "torch", "transformers", "safetensors", "gguf", "tokenizers", "numpy"}

PRINT_LOADED = "import sys, {module}; print(*{{name.partition('.')[0] for name in sys.modules}})"


def loaded_by(module: str) -> set[str]:
    """Top-level names of what a fresh interpreter has loaded after importing `module`."""
    done = subprocess.run([sys.executable, "-c", PRINT_LOADED.format(module=module)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_command_line_loads_no_engine():
    loaded = loaded_by("harness.cli")
    assert "harness" in loaded
    assert not loaded & ENGINE_LIBRARIES


def test_the_verbs_load_no_engine_before_one_is_asked_for():
    loaded = loaded_by("harness.verbs")
    assert "harness" in loaded
    assert not loaded & ENGINE_LIBRARIES


def test_checkpoints_can_be_looked_up_without_an_engine():
    assert not loaded_by("harness.checkpoints") & ENGINE_LIBRARIES
