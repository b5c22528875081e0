"""Real vLLM on a CUDA device, running by itself: judged over HTTP with a bfloat16 tracer, and live from within.

    CAESURA_RECORD=FOLDER pytest -m gpu property_tests/gpu/test_vllm_outside_cuda.py

With CAESURA_RECORD each table of `caesura check` is kept there, as check.SERVER.json, and the live logs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from harness.checkpoints import ensure
from harness.scenario import load_scenario
from harness.trial import Trial

from ..vllm.differences import BROKEN, MODES, from_outside, live, unreported, violated
from ..vllm.servers import serving

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")]

SERVER = "--dtype bfloat16 --max-model-len 2048 --max-num-seqs 8 --block-size 16 --gpu-memory-utilization 0.2"
FOLDERS = '--worker-extension-cls harness.backends.http.vllm_folders.Extension --weight-transfer-config {"backend":"folders"}'
SERVERS = {"eager": "--enforce-eager", "graphs": "", "sessions": f"--enforce-eager {FOLDERS}"}
"""By its own choice vLLM compiles the model and replays CUDA graphs; weights are pushed by /collective_rpc, or in sessions."""
TOKEN_API_BY_ITSELF = {"vllm-0.26", "vllm-0.27", "vllm-0.28", "vllm-0.29"}
"""Versions that have /inference/v1/generate without being asked to."""
BY_TOKENS = {"tokens-conserved", "update-keep-clear", "update-keep-no-clear", "update-abort-clear", "update-wait-clear", "update-and-back"}
"""What the tokens of a tracer tell, and vLLM keeps: none lost, each from the weights that were pushed, none over stale KV but as asked."""
KERNEL_BLOCK_SIZE = 16


@pytest.mark.parametrize("server", SERVERS)
def test_a_server_breaks_from_outside_what_the_page_lists_and_nothing_else(
    server: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from harness.backends.vllm.install import installed
    from harness.check import command
    from harness.tracer.checkpoint import make_tracer

    make_tracer(tmp_path / "tracer", dtype="bfloat16")
    with serving(tmp_path / "tracer" / "v1", f"{SERVER} {SERVERS[server]}") as url:
        command.check(url, command.Asked(None, 10.0, tmp_path / "tracer", False, (), (), tmp_path / "runs", True))
    answer = json.loads(capsys.readouterr().out)
    keep(f"check.{server}.json", json.dumps(answer, indent=1))
    found = {row["id"]: row["verdict"] for row in answer["rows"]}
    assert {name: found[name] for name in BY_TOKENS} == dict.fromkeys(BY_TOKENS, "holds")
    profile = installed().profile.name
    listed = {name: from_outside(name, profile, token_api=profile in TOKEN_API_BY_ITSELF) for name in found}
    judged = {name: verdict for name, verdict in found.items() if verdict != "not-checkable" and listed[name] != "at times"}
    assert judged == {name: listed[name] for name in judged}
    assert answer["left"] == []


@pytest.fixture(scope="module")
def run_live() -> Iterator[Callable[..., Trial]]:
    with live() as run:
        yield run


@pytest.mark.parametrize("file", MODES, ids=lambda file: file.stem)
@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_a_live_engine_is_explained_and_breaks_only_what_has_a_file(
    file: Path, scheduling: str, run_live: Callable[..., Trial], tmp_path: Path
) -> None:
    size = -(-load_scenario(file).engine.block_size // KERNEL_BLOCK_SIZE) * KERNEL_BLOCK_SIZE
    # smollm2 comes from a package index, which a machine with a GPU need not reach.
    fields = {"checkpoint": "tiny", "device": "cuda", "dtype": "bfloat16", "block_size": size}
    trial = run_live(file, tmp_path, **fields, async_scheduling=scheduling == "async")
    for log in tmp_path.glob("events.*.jsonl"):
        keep(
            f"{file.stem}.{scheduling}.{log.name}", log.read_text().replace(str(ensure("tiny")), "tiny")
        )  # of what machine its folder was is nobody's business
    explanation = trial.verdict.explanation
    assert explanation is not None and explanation.mismatch is None, explanation
    assert violated(trial) <= BROKEN | unreported(trial.opened.profile)


def keep(name: str, text: str) -> None:
    """In the folder of CAESURA_RECORD, if there is one."""
    if record := os.environ.get("CAESURA_RECORD"):
        (Path(record) / name).write_text(text)
