"""The drill finds what it should, and says so when it does not."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from harness.cli import main
from harness.errors import BadInput
from harness.faults import CANARY, FAULTS, command
from harness.faults import drill as drilling
from harness.faults.drill import Hunt, Report, chosen, drill
from harness.faults.fault import Fault, Patch
from harness.scenario import load_scenario

pytest.importorskip("torch")

HARMLESS = replace(FAULTS["K10"], id="harmless", plant=lambda patch: None)


@pytest.fixture(autouse=True)
def short_hunts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault that is not found is not found after 300 operations."""
    monkeypatch.setattr(drilling, "MOST_OPERATIONS", 300)


def statuses(report: Report) -> dict[str, str]:
    return {one.fault.id: one.status for one in report.drilled}


def test_every_fault_is_in_exactly_one_third_and_the_canary_in_each() -> None:
    thirds = [chosen(third=third) for third in (1, 2, 3)]
    assert all(third[0] is FAULTS[CANARY] for third in thirds)
    assert sorted(fault.id for third in thirds for fault in third[1:]) == sorted(FAULTS.keys() - {CANARY})
    assert max(map(len, thirds)) - min(map(len, thirds)) <= 1


def test_named_faults_come_with_the_canary() -> None:
    assert [fault.id for fault in chosen(["K31", "K08"])] == [CANARY, "K31", "K08"]


def test_faults_and_thirds_that_do_not_exist_are_refused() -> None:
    with pytest.raises(BadInput, match="no fault 'K99'; there are"):
        chosen(["K99"])
    with pytest.raises(BadInput, match="--third 4: expected 1, 2, 3"):
        chosen(third=4)


def test_faults_are_caught_and_the_engine_without_them_is_clean() -> None:
    report = drill(chosen(["K22", "one-token-too-many", "cached-blocks-evicted-first", "samples-crossed"]), seeds=1)
    assert set(statuses(report).values()) == {"caught"}
    assert report.passed and not report.unfaulted and report.unfaulted_cases > 0


def test_the_smallest_case_is_small_and_says_what_it_violates() -> None:
    (one,) = drill([FAULTS["K22"]], seeds=1, minimal=True).drilled
    assert one.length is not None and one.length <= 4 and one.minimal is not None
    assert one.minimal.fault == "K22" and "atomic-commit" in one.minimal.expect.violates


def test_a_drill_repeats() -> None:
    first, second = (drill(chosen(["K22"]), seeds=2) for _ in range(2))
    assert [one.hunts for one in first.drilled] == [one.hunts for one in second.drilled]


def test_a_fault_of_the_ranks_is_caught_by_the_explorer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drilling.shapes, "SHAPES", {"pause-resume-wave": drilling.shapes.SHAPES["pause-resume-wave"]})
    report = drill([FAULTS["K38"]])
    assert statuses(report) == {"K38": "caught"} and report.passed
    assert report.drilled[0].length == report.drilled[0].median > 8


def test_a_fault_that_nobody_notices_is_missed() -> None:
    report = drill([FAULTS[CANARY], HARMLESS], seeds=1)
    assert statuses(report)["harmless"] == "missed"
    assert not report.passed and not report.void


def test_being_noticed_by_another_invariant_is_not_being_caught() -> None:
    report = drill([FAULTS[CANARY], replace(FAULTS["K22"], caught_by="version-attribution")], seeds=1)
    assert statuses(report)["K22"] == "other"
    assert "atomic-commit" in report.drilled[1].also
    assert not report.passed


def test_a_fault_that_only_the_model_is_to_see_must_break_no_promise() -> None:
    report = drill([FAULTS[CANARY], replace(FAULTS["one-token-too-many"], caught_by="conformance")], seeds=1)
    assert statuses(report)["one-token-too-many"] == "other"


def test_a_shallow_fault_must_be_caught_soon() -> None:
    (one,) = drill([FAULTS["K22"]], seeds=1).drilled
    slow = replace(one, hunts=(one.hunts[0]._replace(operations=drilling.SHALLOW_OPERATIONS),))
    assert slow.status == "slow"
    assert replace(slow, fault=replace(slow.fault, shallow=False)).status == "caught"


def test_most_hunts_must_be_over_in_time() -> None:
    found, given_up = Hunt(1, 10, True, ()), Hunt(9, 300, False, ())
    one = drilling.Drilled(fault=replace(FAULTS["K14"], shallow=False), hunts=(found, found, given_up))
    assert one.status == "caught"
    assert replace(one, hunts=(found, given_up)).status == "missed"


def test_a_drill_whose_canary_survives_is_void(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    survivor = replace(FAULTS[CANARY], plant=lambda patch: None)
    monkeypatch.setattr(command, "chosen", lambda ids, third: [survivor, FAULTS["K22"]])
    assert command.run((), third=None, seeds=1, minimal=None, page_file=None, as_json=False) == 2
    assert capsys.readouterr().out.splitlines()[-1] == "void: canary was not caught, so this drill says nothing"


def test_an_engine_that_is_wrong_without_a_fault_is_said_to_be(capsys: pytest.CaptureFixture[str]) -> None:
    """As if somebody had broken it: everything is then found, and the drill must not pass for that."""
    with FAULTS["K22"].planted():
        assert command.run(["K10"], third=None, seeds=1, minimal=None, page_file=None, as_json=False) == 1
    assert "without a fault: atomic-commit: " in capsys.readouterr().out


def lines(text: str) -> Iterable[str]:
    return (row.split()[0] for row in text.splitlines()[1:-2])


def test_the_verb_says_who_caught_what(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as end:
        main(["drill", "K22", "--seeds", "1", "--minimal", str(tmp_path)])
    out = capsys.readouterr().out
    assert end.value.code == 0, out
    assert list(lines(out)) == [CANARY, "K22"]
    assert "caught  by atomic-commit: " in out
    assert out.splitlines()[-1] == "holds: 2 faults caught, each by the invariant that it names"
    scenario = load_scenario(tmp_path / "k22_update_without_start.yaml")
    assert scenario.fault == "K22" and "atomic-commit" in scenario.expect.violates


def test_the_verb_answers_machines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["drill", "K22", "--seeds", "1", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert end.value.code == 0
    assert (answer["status"], [fault["id"] for fault in answer["faults"]]) == ("holds", [CANARY, "K22"])


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["K99"], "no fault 'K99'; there are K01"),
        (["K22", "--page", "x.md"], "--page x.md: expected no faults to be named"),
        (["K22", "--seeds", "1", "--minimal", "/proc/nowhere"], "cannot be written"),
    ],
)
def test_the_verb_refuses_in_a_sentence(capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["drill", *arguments])
    assert end.value.code == 64
    assert sentence in capsys.readouterr().err


def test_a_fault_that_kills_the_engine_is_not_caught_by_that() -> None:
    def plant(patch: Patch) -> None:
        from engine.scheduler import Scheduler

        patch(Scheduler, "schedule", lambda self: 1 / 0)

    deadly: Fault = replace(FAULTS["K10"], id="deadly", plant=plant)
    assert statuses(drill([deadly], seeds=1))["deadly"] == "missed"
