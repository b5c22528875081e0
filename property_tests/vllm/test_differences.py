"""Every file of scenarios/differences shows what it says, on real vLLM, and its exported script shows it without Caesura."""

from __future__ import annotations

import subprocess
import sys

import pytest

from harness.export import LINES_MAX, script
from harness.scenario import load_scenario

from .differences import DIES, DIFFERENCES, on_the_page, run, unreported, violated

QUICK = ("clear_by_two_calls", "failed_finish_leaves_session_open", "label_of_the_landing", "reset_refused_while_frozen")
"""One of each kind that a script has to do: pending pauses, a phase that fails, steps in flight, a call that is refused."""

by_name = pytest.mark.parametrize("file", DIFFERENCES, ids=lambda file: file.stem)


@by_name
def test_the_scheduler_breaks_exactly_what_the_file_says_in_versions_that_the_page_names(file, tmp_path, needs_vllm):
    trial = run(file, "vllm-scheduler", tmp_path)
    explanation = trial.verdict.explanation
    assert explanation is not None and explanation.mismatch is None, explanation
    profile = trial.opened.profile
    lacking, cell = unreported(profile), on_the_page(file.stem, profile)
    promises = set() if cell == "not there" else set(load_scenario(file).expect.violates)
    assert violated(trial) | lacking == promises | lacking
    assert (promises <= lacking) == (cell != "there")


@by_name
def test_the_engine_does_as_its_scheduler_does_or_dies(file, tmp_path, needs_vllm):
    trial = run(file, "vllm", tmp_path)
    explanation = trial.verdict.explanation
    assert explanation is not None and explanation.mismatch is None, explanation
    assert violated(trial) & set(load_scenario(file).expect.violates)
    assert (trial.entries[-1].event.why == "failed") == (file.stem in DIES)  # type: ignore[union-attr]


@by_name
def test_the_exported_script_is_short_and_imports_only_vllm(file):
    text = script(load_scenario(file), to="vllm", profile="vllm-0.32")
    assert text.count("\n") <= LINES_MAX
    imported = {line.split()[1].split(".")[0].rstrip(",") for line in text.splitlines() if line.startswith(("import ", "from "))}
    assert imported == {"json", "vllm"}
    compile(text, file.stem, "exec")


@by_name
def test_the_exported_script_exits_1_while_the_difference_is_there(file, tmp_path, needs_vllm, request):
    if not request.config.getoption("--long", default=False) and file.stem not in QUICK:
        pytest.skip("with --long: each script starts vLLM anew")
    path = tmp_path / f"{file.stem}.py"
    path.write_text(script(load_scenario(file), to="vllm", profile="vllm-0.32"))
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1, done.stdout + done.stderr[-2000:]
    assert "the difference is" in done.stdout
