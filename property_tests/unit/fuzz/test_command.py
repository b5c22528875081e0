"""The verbs `fuzz` and `explore`: what they print, leave and exit with."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from harness.cli import main
from harness.errors import BadInput
from harness.fuzz.command import overrides_of, seconds_of
from harness.fuzz.known import read_corpus

ROOT = Path(__file__).parents[3]
TOY = f"{ROOT / 'examples' / 'toy_engine.py'}:ToyEngine"


def caesura(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    return int(ended.value.code or 0)


def fuzz(*arguments: object, runs: Path) -> int:
    return caesura("fuzz", "--runs", runs, *arguments)


def test_a_clean_engine_holds(tmp_path: Path, capsys):
    assert fuzz("--engine", "sim", "--cases", 40, runs=tmp_path) == 0
    out = capsys.readouterr().out
    assert "cases          40, " in out
    assert "HOLDS          sim, seeds from 0: no new failure" in out
    assert (tmp_path / "latest" / "report.txt").read_text() == out
    assert not (tmp_path / "latest" / "minimal.yaml").exists()


def test_a_campaign_without_an_end_ends_when_its_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)  # where there is no scenarios/regressions to run first, however slow the machine is
    assert fuzz("--engine", "sim", "--time", "0.1s", runs=tmp_path) == 0
    assert "HOLDS          sim, seeds from 0: no new failure" in capsys.readouterr().out


def test_a_failure_is_left_as_a_file_that_fails_the_same_way(tmp_path: Path, capsys):
    assert fuzz("--engine", TOY, "--cases", 60, "--json", "--junit", tmp_path / "junit.xml", runs=tmp_path) == 1
    answer = json.loads(capsys.readouterr().out)
    (failure,) = answer["failures"]
    assert (failure["id"], failure["minimal_operations"], answer["cases_run"]) == ("mode-fidelity", 2, 60)
    assert caesura("run", failure["minimal"], "--engine", TOY, "--runs", tmp_path, "--json") == 1
    (run,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["invariant"] for one in run["judgements"] if one["status"] == "violated"] == ["mode-fidelity"]
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("2", "1")
    told = suite.find("testcase/failure")
    assert told is not None
    assert "pause(abort) returned with requests alive" in (told.text or "")


def test_run_writes_junit_too(tmp_path: Path, capsys):
    files = [ROOT / "scenarios" / "modes" / name for name in ("keep_clear_two_requests.yaml", "stay_paused.yaml")]
    assert caesura("run", *files, "--engine", "sim", "--runs", tmp_path, "--junit", tmp_path / "run.xml") == 0
    suite = ElementTree.parse(tmp_path / "run.xml").getroot()
    assert (suite.get("name"), suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("caesura run sim", "2", "0", "0")


def test_a_failure_in_the_corpus_is_not_reported_again(tmp_path: Path, capsys):
    corpus = tmp_path / "corpus.yaml"
    assert fuzz("--engine", TOY, "--cases", 40, "--corpus", corpus, runs=tmp_path) == 1
    assert [known.signature.id for known in read_corpus(corpus)] == ["mode-fidelity"]
    capsys.readouterr()
    assert fuzz("--engine", TOY, "--cases", 40, "--corpus", corpus, runs=tmp_path) == 0
    assert "known          mode-fidelity, " in capsys.readouterr().out
    assert len(read_corpus(corpus)) == 1


def test_a_file_that_cannot_be_recalled_is_named_and_the_campaign_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scenarios" / "regressions").mkdir(parents=True)
    broken = tmp_path / "scenarios" / "regressions" / "broken.yaml"
    broken.write_text("timeline: [")
    assert fuzz("--engine", "sim", "--cases", 20, runs=tmp_path) == 0
    assert f"not recalled   {broken}: " in capsys.readouterr().out


def test_what_was_promised_is_told_with_a_new_failure(tmp_path: Path, capsys):
    assert fuzz("--engine", TOY, "--cases", 40, runs=tmp_path) == 1
    assert "\n               expected all 1 requests accepted before the call finished\n" in capsys.readouterr().out


def test_a_campaign_is_taken_up_by_its_folder(tmp_path: Path, capsys):
    assert fuzz("--engine", "sim", "--cases", 30, "--seed", 5, "--set", "engine.block_size=2", runs=tmp_path) == 0
    assert fuzz("--resume", (tmp_path / "latest").resolve(), "--json", runs=tmp_path) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (answer["cases_run"], answer["seed"], answer["overrides"]) == (30, 5, {"block_size": 2})


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--time", "soon"], "--time soon: expected a time above zero"),
        (["--set", "block_size=3"], "expected engine.NAME=VALUE"),
        (["--set", "engine.block_size=none"], "block_size"),
        (["--engine", "none"], "unknown engine 'none'"),
        (["--engine", "none.py:Engine"], "engine file none.py does not exist"),
        (["--resume", "nowhere"], "expected the folder of a campaign"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(arguments: list[str], told: str, tmp_path: Path, capsys):
    assert fuzz(*arguments, "--cases", 1, runs=tmp_path) == 64
    assert told in capsys.readouterr().err


def test_times_and_overrides_are_read():
    assert [seconds_of(text) for text in ("90", "90s", "1.5m", "1h")] == [90, 90, 90, 3600]
    with pytest.raises(BadInput, match="above zero"):
        seconds_of("0s")
    assert overrides_of(["engine.max_num_seqs=3"]) == {"max_num_seqs": 3}


def test_explore_shows_the_shortest_bad_order_or_that_there_is_none(capsys):
    assert caesura("explore", "pause-and-stay", "--ranks", 2) == 0
    assert "1,384 states" in capsys.readouterr().out
    assert caesura("explore", "pause-resume-wave", "--fault", "K36") == 1
    out = capsys.readouterr().out
    assert "violated: collective-symmetry" in out
    assert "\n  16  " in out
    assert caesura("explore", "pause-and-stay", "--max-states", 50, "--json") == 2
    assert json.loads(capsys.readouterr().out)["status"] == "unknown"
    assert caesura("explore", "no-such-shape") == 64
    assert "there are waves" in capsys.readouterr().err
