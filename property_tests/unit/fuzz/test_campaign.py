"""A campaign loses nothing: not by a worker that dies or hangs, not by Ctrl-C, not by being stopped and taken up again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.fuzz.campaign import SLICE_CASES, Campaign, CampaignError, Result
from harness.fuzz.case import API_TRUTH, Case, Finding, Signature
from harness.fuzz.hunt import Failed, Settings, Tally
from harness.fuzz.known import Known
from harness.fuzz.ledger import LEDGER, LedgerError, Plan, read_ledger
from harness.fuzz.team import LocalTeam, Unplaced, Word
from harness.fuzz.worker import Grown, Hunt, Hunted, Recalled, Shrunk, Task
from harness.scenario import EngineShape

ROOT = Path(__file__).parents[3]
LEFT_BY_WAIT = Signature(
    "mode-fidelity", "pause(wait) returned with requests unfinished; expected all requests accepted before the call finished"
)
"""What `Wrong` shows beside a pause(abort) that leaves requests alive."""

ENGINE = """
import os, signal, sys, time
sys.path.insert(0, {examples!r})
from toy_engine import Mended, ToyEngine

class Wrong(ToyEngine):
    pass

class DiesOnce(Mended):
    def abort(self, ids):
        marker = {marker!r}
        if not os.path.exists(marker):
            open(marker, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().abort(ids)

class DiesAlways(Mended):
    def swap_weights(self, seed, version):
        super().swap_weights(seed, version)
        if seed == 3:
            os.kill(os.getpid(), signal.SIGSEGV)

class HangsHard(Mended):
    def swap_weights(self, seed, version):
        super().swap_weights(seed, version)
        if seed == 3:
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
            while True:
                time.sleep(0.1)

class DiesAtThree(Wrong):
    def swap_weights(self, seed, version):
        super().swap_weights(seed, version)
        if seed == 3:
            os.kill(os.getpid(), signal.SIGSEGV)

class RaisesAtThree(Mended):
    def swap_weights(self, seed, version):
        super().swap_weights(seed, version)
        if seed == 3:
            raise KeyError("three")

class HangsAtThree(Mended):
    def swap_weights(self, seed, version):
        super().swap_weights(seed, version)
        while seed == 3:
            time.sleep(0.1)

class Stillborn(Mended):
    def __init__(self, shape):
        os._exit(3)
"""


@pytest.fixture
def engines(tmp_path: Path):
    """Names of the engines above."""
    file = tmp_path / "wrong_engines.py"
    file.write_text(ENGINE.format(examples=str(ROOT / "examples"), marker=str(tmp_path / "died")))
    return lambda name: f"{file}:{name}"


def campaign(engine: str, folder: Path, *, cases: int | None = 150, seed: int = 0, hang_s: float = 60.0, **arguments) -> Result:
    folder.mkdir(exist_ok=True)
    plan = Plan(engine=engine, seed=seed, cases=cases)
    return Campaign(plan, folder, team=LocalTeam(engine, Settings(hang_s=hang_s), folder), **arguments).run()


def test_the_model_is_clean_on_two_processes_and_every_seed_is_run_once(tmp_path: Path):
    result = campaign("sim", tmp_path / "run", cases=300, jobs=2)
    assert (result.tally.cases, result.failures, result.interrupted) == (300, [], False)
    assert read_ledger(tmp_path / "run").done == set(range(300))


def test_a_failure_is_shrunk_once_and_counted_as_often_as_it_comes(engines, tmp_path: Path):
    result = campaign(engines("Wrong"), tmp_path / "run")
    (failure,) = result.new
    assert failure.signature.id == "mode-fidelity"
    assert failure.count > 10
    assert failure.minimal is not None
    assert [operation.verb for operation in failure.minimal.operations] == ["submit", "pause"]


def test_a_known_failure_is_counted_and_not_shrunk(engines, tmp_path: Path):
    (failure,) = campaign(engines("Wrong"), tmp_path / "first").new
    known = [Known(failure.signature, "corpus.yaml"), Known(LEFT_BY_WAIT, "corpus.yaml")]
    result = campaign(engines("Wrong"), tmp_path / "second", known=known)
    assert (result.new, {one.known for one in result.failures}) == ([], {"corpus.yaml"})
    assert {one.signature: one.count for one in result.failures}[failure.signature] == failure.count


def test_a_failure_that_a_known_one_came_before_is_new_and_is_not_shrunk_to_the_known_one(engines, tmp_path: Path):
    (failure,) = campaign(engines("Wrong"), tmp_path / "first").new
    (hidden,) = campaign(engines("Wrong"), tmp_path / "second", known=[Known(failure.signature, "corpus.yaml")]).new
    assert (failure.signature.id, hidden.signature) == ("mode-fidelity", LEFT_BY_WAIT)
    assert failure.signature != LEFT_BY_WAIT
    assert hidden.minimal is not None
    assert any(operation.verb == "pause" and operation.mode == "wait" for operation in hidden.minimal.operations)  # type: ignore[attr-defined]


def scenario(file: Path, *entries: str) -> Path:
    """A file with these entries of a timeline."""
    lines = "".join(f"  - {entry}\n" for entry in entries)
    file.write_text(f"schema: 1\nname: {file.stem}\ntimeline:\n{lines}")
    return file


both_kinds = pytest.mark.parametrize("when", ["", "when: {returned: s1}, "], ids=["operations", "triggers"])
"""A case, or a scenario that is run as `caesura run` does."""


@both_kinds
def test_what_a_scenario_shows_on_this_engine_is_known(engines, tmp_path: Path, when: str):
    entries = ("{submit: {id: r1, prompt: {tokens: 2}}, as: s1}", f"{{{when}pause: {{mode: wait}}}}", "pause: {mode: abort}")
    file = scenario(tmp_path / "aborts_the_waiting.yaml", *entries)
    result = campaign(engines("Wrong"), tmp_path / "run", files=[file])
    assert (result.new, {one.known for one in result.failures}) == ([], {str(file)})


def test_a_worker_that_is_killed_costs_nothing(engines, tmp_path: Path):
    result = campaign(engines("DiesOnce"), tmp_path / "run")
    assert (result.tally.cases, result.failures, result.deaths) == (150, [], 1)
    assert read_ledger(tmp_path / "run").done == set(range(150))


SUBMIT = "{submit: {id: r1, prompt: {tokens: 2}}, as: s1}"


def swap(when: str = "") -> str:
    return f"{{{when}swap_weights: {{source: {{perturb: {{seed: 2, scale: 0.1}}}}}}}}"


@both_kinds
def test_that_a_scenario_makes_the_engine_raise_is_known(engines, tmp_path: Path, when: str):
    file = scenario(tmp_path / "three.yaml", SUBMIT, "pause: {mode: keep}", swap(when))
    result = campaign(engines("RaisesAtThree"), tmp_path / "run", files=[file])
    assert (result.new, {one.known for one in result.failures}, result.not_recalled) == ([], {str(file)}, {})


def test_a_scenario_that_takes_the_process_down_twice_is_named_and_the_others_are_recalled(engines, tmp_path: Path):
    deadly = scenario(tmp_path / "a.yaml", "pause: {mode: keep}", swap())
    file = scenario(tmp_path / "b.yaml", SUBMIT, "pause: {mode: wait}", "pause: {mode: abort}")
    result = campaign(engines("DiesAtThree"), tmp_path / "run", cases=10, files=[deadly, file])
    assert result.not_recalled == {str(deadly): "the engine's process was ended by signal 11 (SIGSEGV)"}
    assert str(file) in {one.known for one in result.failures}
    assert result.tally.cases == 10


@both_kinds
def test_a_scenario_that_hangs_is_bounded_like_a_case(engines, tmp_path: Path, when: str):
    file = scenario(tmp_path / "three.yaml", SUBMIT, "pause: {mode: keep}", swap(when))
    result = campaign(engines("HangsAtThree"), tmp_path / "run", cases=3, hang_s=0.5, files=[file])
    assert result.tally.cases == 3
    assert result.not_recalled == ({str(file): "the engine hangs: no answer within 0.5 s"} if when else {})


def test_a_scenario_that_cannot_be_interrupted_is_killed_and_named(engines, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("harness.fuzz.team.GRACE_S", 0.5)
    file = scenario(tmp_path / "three.yaml", "pause: {mode: keep}", swap())
    result = campaign(engines("HangsHard"), tmp_path / "run", cases=2, hang_s=0.5, files=[file])
    assert "cannot be interrupted" in result.not_recalled[str(file)]
    assert result.tally.cases == 2


def test_a_scenario_that_the_engine_cannot_run_is_passed_over_and_one_that_is_none_is_named(engines, tmp_path: Path):
    beyond = scenario(tmp_path / "beyond.yaml", "sleep: {level: 1}")
    broken = scenario(tmp_path / "broken.yaml", "no_such_verb: {}")
    result = campaign(engines("Mended"), tmp_path / "run", cases=20, files=[beyond, broken])
    assert (result.tally.cases, list(result.not_recalled)) == (20, [str(broken)])


class Script:
    """A worker that says what it is told to, one word for each task."""

    def __init__(self, *words: Callable[[Any], Word]) -> None:
        self.words = iter(words)
        self.task = None

    def give(self, task: Task) -> None:
        self.task = task

    def end(self) -> None:
        pass


class Cast:
    """A team of such workers."""

    def __init__(self, *workers: Script) -> None:
        self._workers = iter(workers)

    def hire(self) -> Script:
        return next(self._workers)

    def listen(self, workers: list[Script], seconds: float) -> Iterator[tuple[Script, Word]]:
        for worker in workers:
            yield worker, next(worker.words)(worker.task)

    def close(self) -> None:
        pass


def test_a_slice_given_to_a_worker_that_has_grown_too_large_is_given_to_another(tmp_path: Path):
    def done(count: int) -> Callable[[Hunt], Word]:
        return lambda task: Hunted(task.first, min(count, task.count), Tally(cases=min(count, task.count)), ())

    team = Cast(Script(done(10), lambda task: Grown(2000)), Script(done(50), done(50)))
    result = Campaign(Plan(engine="sim", seed=0, cases=100), tmp_path, team=team).run()
    assert (result.tally.cases, result.leaks) == (100, [2000])
    assert read_ledger(tmp_path).done == set(range(100))


def shown(sentence: str) -> Finding:
    return Finding(id="golden", operations=1, seq=1, sentence=sentence)


def hunted(*failed: Failed) -> Callable[[Hunt], Word]:
    return lambda task: Hunted(task.first, task.count, Tally(cases=task.count), failed)


def counts(result: Result) -> dict[tuple[str, bool], int]:
    return {(one.signature.words, one.known is not None): one.count for one in result.failures}


def test_a_new_failure_beside_a_known_one_of_its_id_leaves_its_counts_alone(tmp_path: Path):
    old, new = shown("old"), shown("new")
    failed = [Failed(seed=seed, findings=(old, new) if seed == 0 else (old,)) for seed in range(20)]
    smallest = Case(engine=EngineShape(), operations=())
    team = Cast(Script(hunted(*failed), lambda task: Shrunk(task.signature, smallest, "drained", new, 0)))
    result = Campaign(Plan(engine="sim", seed=0, cases=20), tmp_path, team=team, known=[Known(Signature.of(old), "corpus")]).run()
    assert counts(result) == {("new", False): 1, ("old", True): 20}
    assert [one.minimal for one in result.new] == [smallest]
    assert result.failing == 20


def test_nothing_is_new_while_files_are_not_recalled(tmp_path: Path):
    def interrupt(task: Task) -> Word:
        raise KeyboardInterrupt

    failed = Failed(seed=0, findings=(shown("old"),))
    plan, files = Plan(engine="sim", seed=0, cases=10), [Path("one.yaml"), Path("two.yaml")]
    first = Campaign(plan, tmp_path, team=Cast(Script(hunted(failed)), Script()), known=[Known(Signature.of(shown("old")), "here")]).run()
    assert counts(first) == {("old", True): 1}
    stopped = Campaign(plan, tmp_path, team=Cast(Script(lambda task: Recalled(task.file), interrupt)), files=files).run()
    assert (stopped.failures, stopped.uncounted, stopped.not_recalled) == ([], 1, {"two.yaml": "the campaign ended before"})
    recalled = (Known(Signature.of(shown("old")), "two.yaml"),)
    team = Cast(Script(lambda task: Recalled(task.file), lambda task: Recalled(task.file, recalled)))
    result = Campaign(plan, tmp_path, team=team, files=files).run()
    assert ([one.known for one in result.failures], result.uncounted) == (["two.yaml"], 0)


def test_work_of_one_for_whom_there_is_no_room_is_done_by_the_others(tmp_path: Path):
    team = Cast(Script(hunted(), hunted()), Script(lambda task: Unplaced()))
    result = Campaign(Plan(engine="sim", seed=0, cases=2 * SLICE_CASES), tmp_path, team=team, jobs=2).run()
    assert (result.tally.cases, result.unplaced) == (2 * SLICE_CASES, 1)
    assert read_ledger(tmp_path).done == set(range(2 * SLICE_CASES))


def test_an_engine_that_takes_its_process_down_is_a_finding(engines, tmp_path: Path):
    result = campaign(engines("DiesAlways"), tmp_path / "run", cases=12)
    (failure,) = result.new
    assert failure.signature.id == API_TRUTH
    assert failure.shown.sentence == "the engine's process was ended by signal 11 (SIGSEGV)"
    assert result.tally.cases == 12


def test_an_engine_that_cannot_be_interrupted_is_killed_and_its_stack_shown(engines, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("harness.fuzz.team.GRACE_S", 0.5)
    result = campaign(engines("HangsHard"), tmp_path / "run", cases=12, hang_s=0.5)
    (failure,) = result.new
    assert "cannot be interrupted" in failure.shown.sentence
    assert "in swap_weights" in failure.shown.detail
    assert result.tally.cases == 12


def test_an_engine_that_never_starts_ends_the_campaign(engines, tmp_path: Path):
    with pytest.raises(CampaignError, match="3 processes ended with exit code 3 before any case"):
        campaign(engines("Stillborn"), tmp_path / "run")
    with pytest.raises(CampaignError, match="unknown engine 'none'"):
        campaign("none", tmp_path / "other")


def test_a_campaign_goes_on_where_it_was_stopped(tmp_path: Path):
    campaign("sim", tmp_path / "run", cases=100)
    ledger = tmp_path / "run" / LEDGER
    ledger.write_text(ledger.read_text() + '{"first": 100, "cases": 9')  # a kill in the middle of a line
    result = campaign("sim", tmp_path / "run", cases=250)
    assert result.tally.cases == 250
    past = read_ledger(tmp_path / "run")
    assert (past.done, past.tally.cases) == (set(range(250)), 250)


def test_a_folder_without_a_campaign_is_refused(tmp_path: Path):
    with pytest.raises(LedgerError, match="expected the folder of a campaign"):
        read_ledger(tmp_path)
    (tmp_path / LEDGER).write_text('{"schema": 99}\n')
    with pytest.raises(LedgerError, match="schema 2, got 99"):
        read_ledger(tmp_path)


def test_ctrl_c_prints_the_summary_and_loses_nothing(tmp_path: Path):
    command = [sys.executable, "-m", "harness.cli", "fuzz", "--engine", "sim", "--time", "60s", "--runs", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not _hunted(tmp_path):
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 130, out
    folder = next(path for path in tmp_path.iterdir() if path.is_dir() and not path.is_symlink())
    cases = read_ledger(folder).tally.cases
    assert cases > 0
    assert f"cases          {cases:,}," in out
    assert f"caesura fuzz --resume {folder}" in out


def _hunted(runs: Path) -> bool:
    """Whether some slice is in the ledger."""
    return any(len(ledger.read_text().splitlines()) > 1 for ledger in runs.glob(f"*/{LEDGER}"))
