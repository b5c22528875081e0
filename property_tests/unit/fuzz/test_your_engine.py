"""Other people's engines: the protocol of examples/toy_engine.py, judged like ours; the same from pytest."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from hypothesis import given, settings

from harness import Refused, Token, cases, hunt, operations, run
from harness.backends import BackendError, make_backend
from harness.fuzz.case import Case
from harness.fuzz.face import Found

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "toy_engine.py"

spec = importlib.util.spec_from_file_location("toy_engine", EXAMPLE)
assert spec is not None and spec.loader is not None
toy = sys.modules["toy_engine"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(toy)

VERBS = frozenset({"submit", "abort", "step", "advance", "pause", "resume", "swap_weights"})


def submit(id: str = "r1", max_tokens: int = 4) -> operations.Submit:
    return operations.Submit(id=id, prompt=operations.Prompt(tokens=3), max_tokens=max_tokens)


def ids_found(engine: type, *asked: operations.Operation, drain: bool = True) -> list[str]:
    return [finding.id for finding in run(engine, asked, drain=drain).findings]


def test_the_toy_engine_is_caught_and_the_mended_one_is_clean():
    with pytest.raises(Found, match=r"pause\(abort\) returned with requests alive") as caught:
        hunt(toy.ToyEngine, cases=100)
    assert [operation.verb for operation in caught.value.outcome.case.operations] == ["submit", "pause"]
    assert "- pause:" in caught.value.scenario
    assert hunt(toy.Mended, cases=300) > 5000


@settings(max_examples=50)
@given(case=cases(verbs=VERBS))
def test_the_mended_engine_is_clean_whatever_hypothesis_draws(case: Case):
    assert run(toy.Mended, case).clean


def test_steps_while_paused_are_found():
    class Runs(toy.Mended):
        def has_work(self) -> bool:
            return bool(self.running or self.waiting)

        def quiet(self) -> bool:
            return True

    assert "no-step-while-paused" in ids_found(Runs, submit(), operations.Step(), operations.Pause(mode="keep"), operations.Step())


def test_a_request_that_is_forgotten_is_found():
    class Forgets(toy.Mended):
        def resume(self) -> None:
            self.waiting.clear()
            super().resume()

    assert "one-ending" in ids_found(Forgets, operations.Pause(mode="keep"), submit(), operations.Resume())


def test_a_request_that_ends_twice_is_found():
    class EndsTwice(toy.Mended):
        def step(self):
            for token in super().step():
                yield token
                if token.finish_reason is not None:
                    yield Token(token.request, None, "abort")

    assert "one-ending" in ids_found(EndsTwice, submit())


def test_more_tokens_than_asked_for_are_found():
    class Generous(toy.Mended):
        def submit(self, id, prompt, max_tokens) -> None:
            super().submit(id, prompt, max_tokens + 1)

    assert "bookkeeping-shape" in ids_found(Generous, submit())


def test_a_pause_that_overrides_and_one_that_is_overridden_are_told_apart():
    asked = [submit(), operations.Step(), operations.Pause(mode="wait"), operations.Pause(mode="keep"), operations.Resume()]
    outcome = run(toy.Mended, asked)
    codes = [entry.event.error.code for entry in outcome.entries if getattr(entry.event, "error", None)]
    assert (outcome.clean, codes) == (True, ["superseded"])


def test_a_refusal_is_an_answer_and_anything_else_a_crash():
    class Refuses(toy.Mended):
        def pause(self, mode, clear_cache):
            raise Refused("not today", code="conflict")

    class Crashes(toy.Mended):
        def pause(self, mode, clear_cache):
            raise RuntimeError("not today")

    assert "api-truth" not in ids_found(Refuses, submit(), operations.Pause(mode="keep"))
    assert ids_found(Crashes, submit(), operations.Pause(mode="keep")) == ["api-truth"]


def test_what_is_no_engine_is_refused():
    with pytest.raises(BackendError, match="int is no engine: it lacks submit, abort, has_work"):
        hunt(int)  # type: ignore[arg-type]
    with pytest.raises(BackendError, match="has no class 'Nothing'"):
        make_backend(f"{EXAMPLE}:Nothing")
    with pytest.raises(BackendError, match="no module named 'no_such_module'"):
        make_backend("no_such_module:Engine")


def run_pytest(folder: Path, text: str) -> str:
    """What a pytest that knows our plugin says of a test file that imports the example."""
    (folder / "test_mine.py").write_text(text)
    installed = any(point.name == "caesura" for point in entry_points(group="pytest11"))
    plugin = [] if installed else ["-p", "harness.pytest_plugin"]
    options = ["--caesura-cases", "100", "-p", "no:cacheprovider", "--basetemp", str(folder / "temp")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLE.parent)])}
    command = [sys.executable, "-m", "pytest", *plugin, *options, "test_mine.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return done.stdout + done.stderr


def test_pytest_fuzzes_by_a_fixture_and_leaves_the_minimal_file(tmp_path: Path):
    told = run_pytest(tmp_path, "from toy_engine import ToyEngine\n\ndef test_wrong(caesura):\n    caesura(ToyEngine, seed=3)\n")
    assert "mode-fidelity: pause(abort) returned with requests alive" in told
    assert "1 failed" in told
    assert (tmp_path / "temp" / "test_wrong0" / "minimal.yaml").exists()


def test_what_the_page_shows_passes(tmp_path: Path):
    page = (ROOT / "docs" / "your-engine.md").read_text()
    told = run_pytest(tmp_path, "\n\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    assert "3 passed" in told, told
    minimal = "\n".join(line for line in page.splitlines() if line.startswith("  - "))
    with pytest.raises(Found) as caught:
        hunt(toy.ToyEngine, cases=100)
    assert minimal in caught.value.scenario
