"""scenarios/failures/: each file violates under its fault exactly what it says, and holds without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.backends import make_backend
from harness.cli import main
from harness.events import Closed, Entry
from harness.execute import Lockstep
from harness.faults import CONFORMANCE, FAULTS, fault_named
from harness.invariants import Judge
from harness.scenario import Scenario, dump, load_scenario
from harness.trial import opened_event

from .conftest import ROOT

FILES = sorted((ROOT / "scenarios" / "failures").glob("*.yaml"))
NEEDS_NUMBERS = "golden"
"""Judged by numbers computed again, which a lockstep alone does not do."""

each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def carried_out(scenario: Scenario, engine: str) -> tuple[list[Entry], Judge]:
    backend, judge = make_backend(engine), Judge()
    entries: list[Entry] = []
    info = backend.start(scenario.engine)
    try:
        Lockstep(scenario, backend, [entries.extend, judge.feed]).run(opened_event(scenario.engine, backend, info, digest="", seed=0))
    finally:
        backend.stop()
    return entries, judge


def violated(judge: Judge) -> set[str]:
    return {judgement.invariant for judgement in judge.finish() if judgement.status == "violated"}


def test_every_known_failure_of_the_engine_has_a_file() -> None:
    named = {load_scenario(path).fault for path in FILES}
    assert named == {id for id, fault in FAULTS.items() if id[0] == "K" and fault.mutates == "engine"}


@each_file
def test_it_is_named_after_its_fault_and_expects_what_the_fault_names(path: Path) -> None:
    scenario = load_scenario(path)
    assert scenario.fault is not None
    fault = fault_named(scenario.fault)
    assert path.stem == fault.name
    assert fault.caught_by in (*scenario.expect.violates, CONFORMANCE)


@each_file
@pytest.mark.parametrize("engine", ["sim", "torch"])
def test_without_its_fault_it_holds(path: Path, engine: str) -> None:
    if engine == "torch":
        pytest.importorskip("torch")
    scenario = load_scenario(path)
    entries, judge = carried_out(scenario, engine)
    closed = entries[-1].event
    assert violated(judge) == set()
    assert isinstance(closed, Closed) and closed.why == scenario.expect.ends


@each_file
def test_under_its_fault_it_violates_what_it_says(path: Path) -> None:
    pytest.importorskip("torch")
    scenario = load_scenario(path)
    assert scenario.fault is not None
    with fault_named(scenario.fault).planted():
        _, judge = carried_out(scenario, "torch")
    assert violated(judge) == set(scenario.expect.violates) - {NEEDS_NUMBERS}


def test_what_a_file_expects_it_expects_under_its_fault_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = load_scenario(ROOT / "scenarios" / "failures" / f"{FAULTS['K10'].name}.yaml")
    codes = []
    for name, one in (("with", scenario), ("without", replace(scenario, fault=None))):
        (tmp_path / f"{name}.yaml").write_text(dump(one))
        with pytest.raises(SystemExit) as end:
            main(["run", str(tmp_path / f"{name}.yaml"), "--runs", str(tmp_path / "runs")])
        codes.append(end.value.code)
    assert codes == [0, 1]
    assert "api-truth was expected to be violated and is not" in capsys.readouterr().out


def test_a_fault_is_written_and_read(tmp_path: Path) -> None:
    scenario = load_scenario(FILES[0])
    (tmp_path / "again.yaml").write_text(dump(scenario))
    assert load_scenario(tmp_path / "again.yaml") == scenario
    assert scenario.fault is not None
