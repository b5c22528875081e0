"""Which scenarios show that vLLM breaks a promise, and which: what docs/vllm.md says in words."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.backends import CannotRun, make_backend, make_live_backend
from harness.model.profile import Profile
from harness.scenario import load_scenario
from harness.trial import Trial, check_possible, run_live_trial, run_trial

SCENARIOS = Path(__file__).parents[2] / "scenarios"
DIFFERENCES = sorted((SCENARIOS / "differences").glob("*.yaml"))
PAGE = SCENARIOS.parent / "docs" / "vllm.md"
MODES = sorted((SCENARIOS / "modes").glob("*.yaml"))

DIES = {"failed_update_serves", "resume_in_session"}
"""Differences after which the real engine's next step breaks: its weights are not there. Its scheduler goes on."""

BROKEN = {promise for file in DIFFERENCES for promise in load_scenario(file).expect.violates}
"""Every promise that vLLM is known to break."""


def on_the_page(difference: str, profile: str) -> str:
    """What docs/vllm.md says of a difference under the version of a profile: there, not there or unseen."""
    cell = _cell("file", difference, profile)
    assert cell is not None, f"docs/vllm.md does not say which version has {difference}"
    return cell


def from_outside(check: str, profile: str, *, token_api: bool) -> str:
    """What docs/vllm.md says of a check of `caesura check` under the version of a profile: holds, violated, at times or none.

    Args:
        token_api: whether the server has /inference/v1/generate switched on, which `check` then speaks.
    """
    cell = _cell("check", check, profile) or "holds"
    if cell in ("tokens", "text"):
        return "violated" if (cell == "tokens") == token_api else "holds"
    return cell


def _cell(table: str, row: str, profile: str) -> str | None:
    """What stands in a row of the page's table of versions whose first column is headed so; None if it has no such row."""
    lines = (line for line in PAGE.read_text().splitlines() if line.startswith("|"))
    rows = [[cell.strip(" `") for cell in line.split("|")[1:-1]] for line in lines]
    versions = next(row for row in rows if row[:2] == [table, "0.26"])
    version = profile.removeprefix("vllm-")
    if version not in versions:
        pytest.skip(f"docs/vllm.md has no column for {version}")
    cells = next((cells for cells in rows if cells[0] == row and len(cells) == len(versions)), None)
    return cells[versions.index(version)] if cells else None


def unreported(profile: str) -> set[str]:
    """What a version without version spans breaks in every log with a finished request."""
    return set() if Profile.named(profile).reports_spans else {"version-attribution"}


def run(file: Path, engine: str, folder: Path, **fields: Any) -> Trial:
    """The scenario on the engine, with the model following; `fields` override its shape. Skipped if it asks for what vLLM cannot."""
    scenario = load_scenario(file)
    scenario = replace(scenario, engine=scenario.engine.model_copy(update=fields))
    backend = make_backend(engine)
    try:
        info = backend.start(scenario.engine)
        check_possible(scenario, backend, info)
        return run_trial(scenario, backend, info, folder, explain=True)
    except CannotRun as refusal:
        pytest.skip(str(refusal))
    finally:
        backend.stop()


@contextmanager
def live() -> Iterator[Callable[..., Trial]]:
    """`run` for the live engine: one engine for all scenarios that fit it, as `caesura run` has it."""
    backend = make_live_backend("vllm-live")
    with asyncio.Runner() as runner:

        def run_live(file: Path, folder: Path, **fields: Any) -> Trial:
            scenario = load_scenario(file)
            scenario = replace(scenario, engine=scenario.engine.model_copy(update=fields))
            try:
                return runner.run(run_live_trial(scenario, backend, folder))
            except CannotRun as refusal:
                pytest.skip(str(refusal))

        yield run_live
        runner.run(backend.stop())


def violated(trial: Trial) -> set[str]:
    return {judgement.invariant for judgement in trial.verdict.judgements if judgement.status == "violated"}
