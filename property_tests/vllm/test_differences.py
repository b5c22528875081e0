"""Every file of scenarios/differences shows what it says, on real vLLM, and its exported script shows it without Caesura."""

from __future__ import annotations

import subprocess
import sys

import pytest

from harness.backends.vllm.install import installed
from harness.export import LINES_MAX, script
from harness.scenario import load_scenario

from .differences import DIES_ON_CPU, DIFFERENCES, run

by_name = pytest.mark.parametrize("file", DIFFERENCES, ids=lambda file: file.stem)


@by_name
def test_the_scheduler_breaks_exactly_what_the_file_says(file, tmp_path, needs_vllm):
    verdict = run(file, "vllm-scheduler", tmp_path).verdict
    assert verdict.explanation is not None and verdict.explanation.mismatch is None, verdict.explanation.mismatch
    violated = {judgement.invariant for judgement in verdict.judgements if judgement.status == "violated"}
    # A version without spans breaks their promise in every log with a finished request.
    unreported = set() if installed().profile.reports_spans else {"version-attribution"}
    assert violated | unreported == set(load_scenario(file).expect.violates) | unreported


@by_name
def test_the_engine_does_as_its_scheduler_does_or_dies(file, tmp_path, needs_vllm):
    trial = run(file, "vllm", tmp_path)
    assert trial.verdict.explanation is not None and trial.verdict.explanation.mismatch is None, trial.verdict.explanation.mismatch
    violated = {judgement.invariant for judgement in trial.verdict.judgements if judgement.status == "violated"}
    assert violated & set(load_scenario(file).expect.violates)
    assert (trial.entries[-1].event.why == "failed") == (file.stem in DIES_ON_CPU)  # type: ignore[union-attr]


@by_name
def test_the_exported_script_is_short_and_imports_only_vllm(file):
    text = script(load_scenario(file), to="vllm", profile="vllm-0.32")
    assert text.count("\n") <= LINES_MAX
    imported = {line.split()[1].split(".")[0].rstrip(",") for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imported == {"json", "vllm"}
    compile(text, file.stem, "exec")


@by_name
def test_the_exported_script_exits_1_while_the_difference_is_there(file, tmp_path, needs_vllm):
    path = tmp_path / f"{file.stem}.py"
    path.write_text(script(load_scenario(file), to="vllm", profile="vllm-0.32"))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr[-2000:]
    assert "the difference is" in done.stdout
