"""The model depends on nothing but what it is given, so that a log can be judged anywhere and again."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

import harness.model

MODEL = Path(harness.model.__file__).parent
SOURCES = sorted(MODEL.glob("*.py"))
ALLOWED_MODULES = (
    "__future__",
    "collections",
    "collections.abc",
    "itertools",
    "dataclasses",
    "typing",
    "harness.operations",
    "harness.events",
    "harness.state",
)
BANNED_NAMES = {
    "set": "dict.fromkeys: a dict keeps its order",
    "frozenset": "a tuple, or dict.fromkeys",
    "id": "an id that the caller gave",
    "hash": "harness.model.labels: dense integers",
    "open": "arguments: the model reads nothing",
    "print": "events: the model writes nothing",
    "input": "arguments: the model reads nothing",
    "globals": "arguments",
    "__import__": "an import that this test can see",
    "eval": "code that this test can see",
    "exec": "code that this test can see",
}


def impurities(source: str) -> list[str]:
    """What the source must not use, each with its line and what to use instead."""
    found = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module)):
                modules = [module]
            case ast.Set() | ast.SetComp():
                found.append(f"line {node.lineno}: a set; use {BANNED_NAMES['set']}")
                continue
            case ast.Name(id=name) if name in BANNED_NAMES:
                found.append(f"line {node.lineno}: {name}; use {BANNED_NAMES[name]}")
                continue
            case _:
                continue
        for module in modules:
            if module not in ALLOWED_MODULES and not f"{module}.".startswith("harness.model."):
                found.append(f"line {node.lineno}: import of {module}; use arguments (tokens, times and choices are given to the model)")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_the_model_uses_nothing_that_could_differ_between_two_runs(path):
    assert impurities(path.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize(
    "line",
    [
        "import random",
        "import time",
        "from os import environ",
        "import uuid",
        "import harness.backends",
        "from harness.modelling import x",
        "for x in {1, 2}: pass",
        "y = {x for x in z}",
        "y = sorted(set(z))",
        "y = id(z)",
        "y = hash('z')",
        "y = frozenset()",
    ],
)
def test_the_ban_finds(line):
    (finding,) = impurities(line)
    assert finding.startswith("line 1: ") and "; use " in finding


def test_the_model_has_sources_to_judge():
    assert "scheduler.py" in [path.name for path in SOURCES]


EPISODE = """
from dataclasses import make_dataclass
from harness.model import EngineModel
from harness.model.symbolic import symbolic_token
from harness.operations import Abort, Pause, Prompt, Resume, Sleep, Submit, SwapWeights, WakeUp, WeightSource

fields = dict(block_size=4, num_blocks=6, max_model_len=24, max_num_seqs=3, max_num_batched_tokens=8,
              prefix_caching=True, long_prefill_token_threshold=0, late_requests="queue", async_scheduling=True, host_blocks=3)
model = EngineModel(make_dataclass("Shape", fields)(**fields))
choices = 20250101
for op in range(300):
    choices = (choices * 6364136223846793005 + 1442695040888963407) % 2**64
    choice = choices >> 33
    operation = (
        Submit(id=f"r{choice % 97}", prompt=Prompt(tokens=1 + choice % 9, seed=choice % 2), max_tokens=1 + choice % 7),
        Submit(id=f"s{choice % 97}", prompt=Prompt(tokens=1 + choice % 9, seed=choice % 2), max_tokens=1 + choice % 7),
        Abort(ids=(f"r{choice % 97}",)),
        Pause(mode=("abort", "wait", "keep")[choice % 3], clear_cache=choice % 2 == 0),
        SwapWeights(source=WeightSource(original=True), version=f"v{choice % 5}"),
        Resume(),
        Sleep(level=choice % 3),
        WakeUp(),
        WakeUp(),
    )[choice // 97 % 9]
    print(*model.apply(op, operation), model.state(), sep="\\n")
    for _ in range(choice % 4):
        if model.launch_due:
            print(*model.schedule(), sep="\\n")
        if model.landing_due:
            print(*model.land(lambda request, position: symbolic_token(request, position, model.epoch)), sep="\\n")
"""


def test_two_processes_with_different_hash_seeds_give_the_same_events():
    outputs = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(MODEL.parent.parent)}
        finished = subprocess.run([sys.executable, "-c", EPISODE], env=environment, capture_output=True, text=True, check=True)
        outputs.append(finished.stdout)
    assert outputs[0].count("Launched(") > 50, "an episode in which little happens proves little"
    assert outputs[0] == outputs[1]
