"""The `workload:` section: what loads, what is refused, and that the files in scenarios/workloads hold and show their shape."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
import yaml

from harness.cli import main
from harness.events import Closed
from harness.scenario import Scenario, ScenarioError, Workload, dump, load_scenario
from harness.simulation.figures import Figures, figures_of
from reports.simulation import figure_lines

from .runs import flaws, scenario, simulate

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "scenarios" / "workloads").glob("*.yaml"))
EDITOR = jsonschema.Draft202012Validator(json.loads((ROOT / "docs" / "scenario.schema.json").read_text()))

PAGE = (ROOT / "docs" / "simulation.md").read_text(encoding="utf-8")

HEAD = "schema: 1\nname: a test\n"
LEAST = "workload: {rollouts: 8, arrivals: {workers: 2}, prompt: {median: 4, p99: 8}, output: {median: 4, p99: 8}}\n"
TRAINED = LEAST.replace("}}\n", "}, trainer: {batch: 4, train_ms: 1, transfer_ms: 1, mode: keep, clear_cache: true}}\n")
ROOFLINE = "latency: {roofline: {weights_gb: 1, kv_kb_per_token: 1, gflop_per_token: 1, memory_gb_per_s: 1, compute_tflop_per_s: 1}}\n"


@pytest.fixture
def problems(tmp_path: Path) -> Callable[[str], list[str]]:
    """The lines of the error that a content is refused with."""

    def problems(content: str) -> list[str]:
        path = tmp_path / "x.yaml"
        path.write_text(content)
        with pytest.raises(ScenarioError) as refused:
            load_scenario(path)
        return str(refused.value).replace(f"{tmp_path}/", "").split("\n")

    return problems


# The section


def test_a_workload_needs_no_timeline(tmp_path: Path):
    path = tmp_path / "x.yaml"
    path.write_text(HEAD + LEAST)
    loaded = load_scenario(path)
    assert loaded.timeline == ()
    assert loaded.workload is not None and loaded.workload.rollouts == 8
    EDITOR.validate(yaml.safe_load(HEAD + LEAST))


def test_a_workload_is_written_and_read_back_equal(tmp_path: Path):
    written = scenario(retry_ms=1.5, trainer={"every_steps": 5, "train_ms": 1, "transfer_ms": 1, "mode": "wait", "clear_cache": False})
    path = tmp_path / "x.yaml"
    path.write_text(dump(written))
    assert load_scenario(path) == written
    EDITOR.validate(yaml.safe_load(dump(written)))


WRONG = [
    (HEAD, "1: timeline: got nothing; it is required, unless there is a `workload`"),
    (HEAD + LEAST.replace("{workers: 2}", "{}"), "3: workload.arrivals: got {}; expected exactly one of `workers` and `per_s`"),
    (HEAD + LEAST.replace("{workers: 2}", "{workers: 0}"), "3: workload.arrivals.workers: got 0; expected at least 1"),
    (HEAD + LEAST.replace("p99: 8", "p99: 3", 1), "3: workload.prompt: got {'median': 4, 'p99': 3}; got p99 3 below the median 4"),
    (HEAD + LEAST.replace("rollouts", "rolouts"), "3: workload.rolouts: unknown field, did you mean `rollouts`?"),
    (HEAD + TRAINED.replace("batch: 4, ", ""), "3: workload.trainer: got "),
    (HEAD + TRAINED.replace("mode: keep", "mode: kep"), "3: workload.trainer.mode: got 'kep'; expected 'abort', 'wait' or 'keep'"),
    (HEAD + TRAINED.replace("batch: 4", "every_steps: 4, staleness: {bound: 1, beyond: drop}"), "3: workload.trainer: got "),
    (
        HEAD + LEAST + "timeline:\n  - submit: {id: p0.s0.0, prompt: {tokens: 4}}\n",
        "5: timeline[0].submit.id: got 'p0.s0.0', a name for rollouts; expected another beside a workload",
    ),
    (HEAD + LEAST + "timeline:\n  - step:\n", "5: timeline[0]: got `step`; expected none beside a workload"),
    (
        HEAD + TRAINED + "timeline:\n  - resume:\n",
        "5: timeline[0]: got `resume`; expected none beside a workload whose trainer pauses and updates",
    ),
    (
        HEAD + ROOFLINE + "timeline: []\n",
        "3: latency.roofline: got no `workload`; expected `step_ms`: a timeline alone runs in steps of one length",
    ),
]


@pytest.mark.parametrize(("content", "expected"), WRONG)
def test_what_cannot_be_simulated_is_refused_with_its_line(problems, content: str, expected: str):
    assert [line for line in problems(content) if line.startswith(f"x.yaml:{expected}")]


@pytest.mark.parametrize("command", [["run", "x.yaml", "--engine", "torch"], ["diff", "x.yaml", "--engines", "sim,torch"]])
def test_a_workload_runs_on_the_model_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(HEAD + LEAST)
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 64
    assert "expected `run --engine sim`" in capsys.readouterr().err
    assert not Path("runs").exists()


def test_json_has_the_figures_for_machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(HEAD + TRAINED)
    with pytest.raises(SystemExit) as ended:
        main(["run", "x.yaml", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert (ended.value.code or 0, answer["status"]) == (0, "holds")
    assert (answer["figures"]["rollouts"], answer["figures"]["updates"]) == (8, 2)
    assert sum(answer["figures"]["staleness"].values()) == 8


def test_a_run_is_replayed_and_reported_with_the_same_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(HEAD + TRAINED)
    told = []
    for command in (["run", "x.yaml"], ["replay", "runs/latest"], ["report", "runs/latest"]):
        with pytest.raises(SystemExit):
            main(command)
        told.append([line for line in capsys.readouterr().out.splitlines() if line.split(" ")[0] in ("simulated", "staleness", "updates")])
    assert len(told[0]) == 3
    assert told[0] == told[1] == told[2]


# The files


def figures(simulated: Scenario) -> Figures:
    assert simulated.workload is not None
    return figures_of(simulate(simulated), simulated.workload)


def changed(stem: str, **trainer) -> Scenario:
    """A file of scenarios/workloads with another trainer."""
    loaded = load_scenario(ROOT / "scenarios" / "workloads" / f"{stem}.yaml")
    assert loaded.workload is not None and loaded.workload.trainer is not None
    settings = {**loaded.workload.trainer.model_dump(exclude_unset=True), **trainer}
    workload = {**loaded.workload.model_dump(exclude_unset=True), "trainer": settings}
    return replace(loaded, workload=Workload.model_validate(workload))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_workload_file_says_what_it_scales_holds_and_drains(path: Path):
    loaded = load_scenario(path)
    EDITOR.validate(yaml.safe_load(loaded.text))
    assert loaded.text.startswith("# ")
    assert "shape" in loaded.text
    entries = simulate(loaded)
    assert flaws(entries) == []
    assert isinstance(entries[-1].event, Closed) and entries[-1].event.why == "drained"
    assert loaded.workload is not None
    assert figures_of(entries, loaded.workload).updates > 0


def test_a_little_staleness_saves_most_of_the_time_and_the_page_shows_how_much():
    """verl's curve: 231, 171, 146, 151 s a step at thresholds of 0, 0.1, 0.3 and 0.5."""
    seconds = {}
    for bound in (0, 0.1, 0.3, 0.5):
        found = figures(changed("verl_7b_dapo", staleness={"bound": float(bound), "beyond": "hold"}))
        seconds[bound] = found.duration_ns / 1e9 / found.updates
    assert seconds[0] - seconds[0.1] > 2 * (seconds[0.1] - seconds[0.5])
    table = re.findall(r"^\| ([\d.]+) \| \d+ \| ([\d.]+) \|$", PAGE, re.M)
    assert table == [(f"{bound:g}", f"{each:.2f}") for bound, each in seconds.items()]


def test_the_page_shows_figures_as_they_are():
    lines = figure_lines(figures(load_scenario(ROOT / "scenarios" / "workloads" / "verl_7b_dapo.yaml")), margin=15)
    assert "\n".join(lines) in PAGE


def test_the_last_hundredth_of_a_batch_takes_most_of_its_time():
    """tail_40x32: 99 % done at 40 s, the last 1 % at 120 s."""
    times = sorted(figures(load_scenario(ROOT / "scenarios" / "workloads" / "tail_40x32.yaml")).latencies_ns)
    assert times[-1] > 2 * times[len(times) * 99 // 100 - 1]
