"""Situations: each is reached by some scenario, and a log reaches what it shows, at the event that shows it, and nothing else."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from harness.backends.sim import SimBackend
from harness.coverage import Coverage, Sighting, Situations
from harness.events import Entry, Landed, Launched, Preempted, Stored, UpdateFailed
from harness.execute import Lockstep
from harness.invariants import Judge
from harness.scenario import Scenario, load_scenario
from harness.situations import FAMILIES, IN_FLIGHT, SITUATIONS, page
from harness.trial import opened_event, run_trial
from property_tests.unit.invariants.logs import Timeline
from reports.text import Origin, coverage_table, render

ROOT = Path(__file__).parents[2]
MODES = sorted((ROOT / "scenarios" / "modes").glob("*.yaml"))

OUT_OF_REACH = {
    "finished-by-stop": "needs a checkpoint with an end-of-sequence token",
    "token-dropped-finished": "the same, with a step in flight",
    "token-dropped-reset": "our resets wait until no step is in flight; vLLM's do not",
    "step-failed": "needs a model that breaks",
}
"""What no scenario of ours can bring about on the model, and why."""


def run_on_model(scenario: Scenario, *, async_scheduling: bool) -> list[Entry]:
    shape = scenario.engine.model_copy(update={"async_scheduling": async_scheduling})
    scenario, backend, entries = replace(scenario, engine=shape), SimBackend(), []
    info = backend.start(shape)
    Lockstep(scenario, backend, [entries.extend]).run(opened_event(shape, backend, info, digest="", seed=0))
    return entries


@cache
def log_of(stem: str, *, async_scheduling: bool = False) -> list[Entry]:
    return run_on_model(load_scenario(ROOT / "scenarios" / "modes" / f"{stem}.yaml"), async_scheduling=async_scheduling)


def covered(entries: list[Entry]) -> Coverage:
    situations = Situations()
    situations.feed(entries)
    return situations.coverage


# The list


def test_the_published_list_is_current():
    command = "python -c \"from harness.situations import page; print(page(), end='')\" > docs/situations.md"
    assert (ROOT / "docs" / "situations.md").read_text(encoding="utf-8") == page(), f"write it anew: {command}"


def test_every_situation_has_a_name_of_its_own_and_one_sentence():
    assert len(SITUATIONS) == sum(map(len, FAMILIES.values()))
    for name, statement in SITUATIONS.items():
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name), name
        assert re.fullmatch(r"[A-Z`][^|\n]*\.", statement), name


def test_every_situation_is_reached_by_a_scenario_with_or_without_a_step_in_flight():
    reached: dict[bool, set[str]] = {asynchronous: set() for asynchronous in (False, True)}
    for path in MODES:
        for asynchronous, names in reached.items():
            names.update(covered(log_of(path.stem, async_scheduling=asynchronous)))
    assert SITUATIONS.keys() - reached[False] - FAMILIES[IN_FLIGHT].keys() == OUT_OF_REACH.keys() - FAMILIES[IN_FLIGHT].keys()
    assert FAMILIES[IN_FLIGHT].keys() - reached[True] == OUT_OF_REACH.keys() & FAMILIES[IN_FLIGHT].keys()
    assert not FAMILIES[IN_FLIGHT].keys() & reached[False]


@pytest.mark.parametrize("path", MODES, ids=lambda path: path.stem)
def test_a_scenario_reaches_what_it_names_with_a_step_in_flight_too(path):
    assert set(load_scenario(path).expect.reaches) <= covered(log_of(path.stem, async_scheduling=True)).keys()


# Counting


def test_counts_are_the_same_alone_and_beside_a_judge_at_once_and_entry_by_entry():
    entries = log_of("keep_stale_small_pool")
    judge = Judge()
    beside = Situations(judge.replay)
    judge.add_watcher(beside)
    for entry in entries:
        judge.feed([entry])
    assert beside.coverage == covered(entries)
    assert beside.counts == {name: sighting.count for name, sighting in covered(entries).items()}
    with pytest.raises(RuntimeError, match="feed that judge"):
        beside.feed(entries)


def test_a_situation_is_counted_each_time_and_has_the_number_of_its_first_event():
    entries = log_of("preemption_small_pool")
    pressed = [seq for seq, _, _, event in entries if isinstance(event, Preempted) and event.by not in (None, event.request)]
    assert covered(entries)["preempted-by-pressure"] == Sighting(len(pressed), pressed[0])


def test_no_log_however_wrong_is_too_much():
    for stem in ("abort_in_every_state", "equal_prompts"):
        entries = log_of(stem)
        for place in range(1, len(entries)):
            assert covered(entries[:place] + entries[place + 1 :])


# What is told apart


def test_kv_is_stale_at_the_first_sample_over_it_and_not_before():
    log = Timeline().submit("r1", range(3)).admit("r1", [0]).step(("r1", 0, 3), r1=7)
    log.pause("keep").effective("keep").swap("v2").resume()
    assert "token-over-stale-kv" not in covered(log.entries)
    log.step(("r1", 3, 1), r1=8)
    assert covered(log.entries)["token-over-stale-kv"] == Sighting(1, log.last(Launched))
    log.admit("r1", [1]).step(("r1", 4, 1), r1=9)
    assert covered(log.entries)["token-over-stale-kv"].count == 1


def test_a_cleared_cache_leaves_nothing_stale_and_no_block_begun_by_older_weights():
    reached = covered(log_of("keep_clear_two_requests"))
    assert not {"token-over-stale-kv", "block-filled-across-boundary", "prefix-hit-on-older-epoch"} & reached.keys()
    assert {"request-across-boundary", "recomputed-by-new-weights"} <= reached.keys()


def test_a_block_is_filled_across_a_boundary_only_if_older_weights_wrote_a_part_of_it():
    def reached(prompt_tokens: int) -> bool:
        log = Timeline().submit("r1", range(prompt_tokens)).admit("r1", [0, 1])
        log.step(("r1", 0, prompt_tokens), r1=7).pause("keep").effective("keep").swap("v2").resume()
        for position in range(prompt_tokens, 8):
            log.step(("r1", position, 1), r1=8)
        return "block-filled-across-boundary" in covered(log.entries)

    assert reached(3)
    assert not reached(4)


def test_a_boundary_is_crossed_by_whoever_is_given_a_token_after_it_and_has_one_from_before():
    log = Timeline().submit("r1", range(3)).admit("r1", [0]).step(("r1", 0, 3), r1=7)
    log.pause("keep").effective("keep").swap("v2").resume()
    log.submit("r2", range(3)).admit("r2", [1]).step(("r2", 0, 3), r2=5)
    assert "request-across-boundary" not in covered(log.entries)
    log.step(("r1", 3, 1), r1=8)
    assert covered(log.entries)["request-across-boundary"] == Sighting(1, log.last(Landed))


def test_a_label_set_anew_is_no_boundary():
    reached = covered(log_of("version_label_only"))
    assert "request-under-two-labels" in reached
    assert "request-across-boundary" not in reached


def test_an_abort_is_named_by_the_state_that_it_found():
    log = Timeline().submit("r1", range(3)).submit("r2", range(6)).submit("r3", range(3))
    log.admit("r1", [0]).admit("r2", [1]).step(("r1", 0, 3), ("r2", 0, 2), r1=7)
    found = {}
    for request in ("r1", "r2", "r3", "r1"):
        before = covered(log.entries).keys()
        log.abort(request)
        found.setdefault(request, []).append(sorted(covered(log.entries).keys() - before))
    assert found == {"r1": [["abort-of-running"], ["abort-of-nobody"]], "r2": [["abort-mid-prefill"]], "r3": [["abort-of-waiting"]]}


def test_a_prefill_in_chunks_counts_once_a_life():
    log = Timeline().submit("r1", range(8)).admit("r1", [0, 1])
    log.step(("r1", 0, 3)).step(("r1", 3, 3)).step(("r1", 6, 2), r1=7)
    assert covered(log.entries)["chunked-prefill"].count == 1


def test_calls_that_meet_are_named_by_the_newer_over_the_older():
    log = Timeline().submit("r1", range(3)).admit("r1", [0]).step(("r1", 0, 3), r1=7)
    log.pause("wait").pause("abort")
    assert "abort-over-pending-wait" in covered(log.entries)
    log.finish("r1", "abort", head=(0,)).effective("abort", ops=(2, 3)).pause("keep")
    assert {"pause-joined", "abort-pause-kept", "keep-over-paused-abort"} <= covered(log.entries).keys()


def test_equal_contents_in_two_blocks_are_noticed_when_the_second_is_published():
    entries = log_of("equal_prompts")
    seen: set[int] = set()
    for seq, _, _, event in entries:
        if isinstance(event, Stored):
            if any(label in seen for _, label in event.blocks):
                assert covered(entries)["equal-blocks"].first == seq
                return
            seen.update(label for _, label in event.blocks)
    pytest.fail("no label was published twice")


def test_a_failed_update_is_named_by_its_phase():
    for stem, name in (
        ("failed_start", "update-failed-in-start"),
        ("failed_update_stays_out", "update-failed-in-update"),
        ("failed_finish", "update-failed-in-finish"),
        ("session_without_weights", "empty-finish-failed"),
    ):
        entries = log_of(stem)
        first = next(seq for seq, _, _, event in entries if isinstance(event, UpdateFailed))
        failures = {found: sighting for found, sighting in covered(entries).items() if "fail" in found}
        assert failures == {name: Sighting(1, first)}


# Verdicts and reports


def trial_on_model(scenario: Scenario, folder: Path):
    backend = SimBackend()
    return run_trial(scenario, backend, backend.start(scenario.engine), folder)


def test_a_run_that_does_not_reach_what_it_names_is_unknown_and_says_so(tmp_path):
    scenario = load_scenario(ROOT / "scenarios" / "modes" / "keep_clear_two_requests.yaml")
    expect = scenario.expect.model_copy(update={"reaches": ("keep-pause-cleared", "eviction")})
    trial = trial_on_model(replace(scenario, expect=expect), tmp_path)
    assert (trial.verdict.status, trial.verdict.reasons) == ("unknown", ("eviction was to be reached and was not",))


def test_a_report_says_how_many_situations_were_reached_and_names_those_expected(tmp_path):
    trial = trial_on_model(load_scenario(ROOT / "scenarios" / "modes" / "abort_while_waiting.yaml"), tmp_path)
    assert trial.verdict.status == "holds"
    report = render(trial, None, Origin(tmp_path, "caesura run one.yaml"))
    assert f"\nreaches        2 of {len(SITUATIONS)} situations; as expected: abort-of-waiting\n" in report


def test_the_table_lists_every_situation_with_its_count_and_first_event():
    rows = coverage_table({"eviction": Sighting(3, 41)}).splitlines()[1:]
    assert len(rows) == len(SITUATIONS)
    assert [row.split() for row in rows if row.split()[0] != "-"] == [f"3 41 eviction: {SITUATIONS['eviction']}".split()]
