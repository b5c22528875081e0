"""Real vLLM on a CUDA device, running by itself: judged over HTTP with a bfloat16 tracer, and live from within.

    CAESURA_RECORD=FOLDER pytest -m gpu property_tests/gpu/test_vllm_outside_cuda.py

With CAESURA_RECORD the table of `caesura check` is kept there as check.json.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from harness.scenario import load_scenario
from harness.trial import run_live_trial

from ..vllm.differences import BROKEN, MODES, PAGE, unreported, violated
from ..vllm.servers import serving

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")]

SERVER = "--dtype bfloat16 --enforce-eager --max-model-len 2048 --max-num-seqs 8 --block-size 16 --gpu-memory-utilization 0.2"
BY_TOKENS = {"tokens-conserved", "update-keep-clear", "update-keep-no-clear", "update-abort-clear", "update-wait-clear", "update-and-back"}
"""What the tokens of a tracer tell, and vLLM keeps: none lost, each from the weights that were pushed, none over stale KV but as asked."""
QUICK = ("abort_in_every_state", "keep_clear_new_weights", "keep_stale_small_pool", "wait_new_weights", "weights_in_parts")


def test_a_server_breaks_from_outside_only_what_the_page_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from harness.check import command
    from harness.tracer.checkpoint import make_tracer

    make_tracer(tmp_path / "tracer", dtype="bfloat16")
    with serving(tmp_path / "tracer" / "v1", SERVER) as url:
        command.check(url, command.Asked(None, 10.0, tmp_path / "tracer", False, (), (), tmp_path / "runs", True))
    answer = json.loads(capsys.readouterr().out)
    if record := os.environ.get("CAESURA_RECORD"):
        (Path(record) / "check.json").write_text(json.dumps(answer, indent=1))
    found = {row["id"]: row["verdict"] for row in answer["rows"]}
    assert {name: found[name] for name in BY_TOKENS} == dict.fromkeys(BY_TOKENS, "holds")
    assert {name for name, verdict in found.items() if verdict == "violated" and f"`{name}`" not in PAGE.read_text()} == set()
    assert answer["left"] == []


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_a_live_engine_is_explained_and_breaks_only_what_has_a_file(scheduling: str, tmp_path: Path) -> None:
    from harness.backends import make_live_backend

    backend = make_live_backend("vllm-live")
    with asyncio.Runner() as runner:
        try:
            for file in MODES:
                if file.stem not in QUICK:
                    continue
                scenario = load_scenario(file)
                fields = {"device": "cuda", "dtype": "bfloat16", "block_size": 16, "async_scheduling": scheduling == "async"}
                scenario = replace(scenario, engine=scenario.engine.model_copy(update=fields))
                trial = runner.run(run_live_trial(scenario, backend, tmp_path / file.stem))
                assert trial.verdict.explanation is not None and trial.verdict.explanation.mismatch is None, file.stem
                assert violated(trial) <= BROKEN | unreported(trial.opened.profile), file.stem
        finally:
            runner.run(backend.stop())
