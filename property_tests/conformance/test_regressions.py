"""Every failure that was ever found is a file, and holds on the model and on our engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.backends import BackendError, make_backend
from harness.fuzz.case import Case, run_case
from harness.scenario import load_scenario

FILES = sorted((Path(__file__).parents[2] / "scenarios" / "regressions").glob("*.yaml"))


@pytest.mark.parametrize("engine", ["sim", "torch"])
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_regression_holds(file: Path, engine: str) -> None:
    try:
        backend = make_backend(engine)
    except BackendError as error:
        pytest.skip(str(error))
    scenario = load_scenario(file)
    outcome = run_case(Case.of(scenario), backend, drain=False)
    assert outcome.clean, outcome.findings
    assert outcome.ended == scenario.expect.ends


def test_there_are_regressions() -> None:
    assert FILES
