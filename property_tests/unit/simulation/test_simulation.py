"""A workload in virtual time: its log holds every promise, repeats byte for byte, and conserves requests, tokens and time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from harness.events import Closed, Entry, Landed, Launched, PauseEffective, Preempted, Returned
from harness.operations import Abort, IsPaused, Pause, Prompt, Resume, Submit
from harness.scenario import EngineShape, Scenario, TimelineEntry, When, dump
from harness.simulation.figures import figures_of
from harness.simulation.ledger import rollout_of
from harness.simulation.rollouts import rollouts_of
from harness.simulation.simulation import Simulation

from .runs import TRAINER, calls_of, delivered, finished, flaws, scenario, simulate, submits

ROOT = Path(__file__).parents[3]
MODES = [(mode, clear) for mode in ("abort", "wait", "keep") for clear in (True, False)]


def closed(entries: list[Entry]) -> Closed:
    last = entries[-1].event
    assert isinstance(last, Closed)
    return last


def rollout_tokens(entries: list[Entry]) -> Counter[str]:
    """Tokens of each rollout, all its attempts together."""
    tokens: Counter[str] = Counter()
    for request, count in delivered(entries).items():
        tokens[rollout_of(request)] += count
    return tokens


# Every promise holds on it


@pytest.mark.parametrize(("mode", "clear_cache"), MODES)
@pytest.mark.parametrize("late_requests", ["queue", "reject", "block"])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_every_invariant_holds_and_the_model_explains_the_log(mode, clear_cache, late_requests, async_scheduling):
    engine = {"late_requests": late_requests, "async_scheduling": async_scheduling}
    trainer = {**TRAINER, "mode": mode, "clear_cache": clear_cache, "parts": 2}
    entries = simulate(scenario(engine=engine, retry_ms=2, trainer=trainer))
    assert flaws(entries) == []
    assert closed(entries).why == "drained"
    assert sum(isinstance(entry.event, PauseEffective) for entry in entries) == 4


def test_the_small_pool_preempts():
    assert any(isinstance(entry.event, Preempted) and entry.event.by for entry in simulate(scenario()))


# Determinism


def test_two_processes_with_different_hash_seeds_write_the_same_bytes(tmp_path: Path):
    file = tmp_path / "small.yaml"
    file.write_text(dump(scenario(retry_ms=1, trainer={**TRAINER, "mode": "abort"})))
    logs = []
    for hash_seed in ("1", "2"):
        runs = tmp_path / hash_seed
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "harness.cli", "run", file, "--runs", runs, "--seed", "5"]
        subprocess.run(command, env=environment, capture_output=True, check=True)
        logs.append((runs / "latest" / "events.r0.jsonl").read_bytes())
    assert logs[0].count(b"\n") > 100
    assert logs[0] == logs[1]


def test_the_order_of_simultaneous_processes_is_that_of_the_seed_and_stands_in_the_log():
    orders = set()
    for ties in range(200):
        entries = simulate(scenario(rollouts=4, samples=1, arrivals={"workers": 4}), ties=ties)
        orders.add(tuple(entry.event.by for entry, _ in submits(entries)))
    assert len(orders) == 24
    assert {frozenset(order) for order in orders} == {frozenset(f"worker-{number}" for number in range(4))}


def test_another_order_of_simultaneous_events_is_the_same_work():
    runs = [simulate(scenario(trainer=TRAINER), ties=ties) for ties in range(3)]
    assert len({tuple(entry.event.by for entry, _ in submits(entries)) for entries in runs}) == 3
    assert len({tuple(sorted(rollout_tokens(entries).items())) for entries in runs}) == 1


# Conservation


@pytest.mark.parametrize(("mode", "clear_cache"), MODES)
@pytest.mark.parametrize("seed", [0, 1])
def test_each_rollout_gets_exactly_the_tokens_that_were_drawn_for_it(mode, clear_cache, seed):
    small = scenario(retry_ms=1, trainer={**TRAINER, "mode": mode, "clear_cache": clear_cache})
    assert small.workload is not None
    entries = simulate(small, seed=seed)
    drawn = {rollout.name: rollout.tokens for rollout in rollouts_of(small.workload, small.engine, seed)}
    assert rollout_tokens(entries) == drawn
    assert sum(event.reason == "length" for _, event in finished(entries)) == len(drawn)


def test_an_aborted_rollout_goes_on_where_it_was_and_its_tokens_become_its_prompt():
    entries = simulate(scenario(retry_ms=1, trainer={**TRAINER, "mode": "abort"}))
    handed_in = {submit["id"]: submit for _, submit in submits(entries)}
    tokens = delivered(entries)
    resubmitted = 0
    for request, submit in handed_in.items():
        name, _, attempt = request.rpartition(".")
        before = handed_in.get(f"{name}.{int(attempt) - 1}")
        if before is None or not tokens.get(before["id"]):
            continue
        resubmitted += 1
        assert submit["max_tokens"] == before["max_tokens"] - tokens[before["id"]]
        assert (
            len(Prompt.model_validate(submit["prompt"]).token_ids or ())
            == len(Prompt.model_validate(before["prompt"]).token_ids or ()) + tokens[before["id"]]
        )
    assert resubmitted > 3


def test_an_aborted_rollout_that_restarts_is_generated_whole_by_its_last_request():
    small = scenario(aborted="restart", retry_ms=1, trainer={**TRAINER, "mode": "abort"})
    assert small.workload is not None
    entries = simulate(small)
    drawn = {rollout.name: rollout.tokens for rollout in rollouts_of(small.workload, small.engine, 0)}
    whole = {rollout_of(event.request): event.output_tokens for _, event in finished(entries) if event.reason == "length"}
    assert whole == drawn
    assert sum(event.reason == "abort" for _, event in finished(entries)) > 3


@pytest.mark.parametrize("arrivals", [{"workers": 6}, {"per_s": 300}])
@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_littles_law_holds_to_the_nanosecond(arrivals, mode):
    """L = lambda W over a drained run: requests in the engine, summed over time, are the times that requests were in it."""
    small = scenario(arrivals=arrivals, retry_ms=1, trainer={**TRAINER, "mode": mode})
    assert small.workload is not None
    entries = simulate(small)
    in_system_ns = last_ns = inside = 0
    for entry in entries:
        in_system_ns += inside * (entry.t_ns - last_ns)
        last_ns = entry.t_ns
        inside += (entry.event.__struct_config__.tag == "accepted") - (entry.event.__struct_config__.tag == "finished")
    came_ns = {submit["id"]: entry.t_ns for entry, submit in submits(entries)}
    assert in_system_ns == sum(t_ns - came_ns[event.request] for t_ns, event in finished(entries)) > 0
    if mode == "keep":  # one request a rollout
        assert in_system_ns == sum(figures_of(entries, small.workload).latencies_ns)


# Arrivals


def test_a_closed_loop_never_has_more_rollouts_than_workers():
    inside, most = 0, 0
    for entry in simulate(scenario(arrivals={"workers": 5})):
        kind = entry.event.__struct_config__.tag
        inside += (kind == "accepted") - (kind == "finished")
        most = max(most, inside)
    assert most == 5


def test_arrivals_of_an_open_loop_do_not_depend_on_the_engine():
    logs = [simulate(scenario(arrivals={"per_s": 400}, latency={"step_ms": step_ms})) for step_ms in (0.5, 5)]
    first, second = ([(entry.t_ns, submit) for entry, submit in submits(entries)] for entries in logs)
    assert first == second


def test_lengths_are_cut_to_what_a_request_can_hold():
    small = scenario(output={"median": 500, "p99": 5000}, engine={"max_model_len": 40})
    assert small.workload is not None
    rollouts = rollouts_of(small.workload, small.engine, 0)
    assert {len(rollout.prompt.token_ids or ()) + rollout.tokens for rollout in rollouts} == {40}
    assert flaws(simulate(small)) == []


# Time


def test_a_step_lands_when_its_cost_has_passed():
    entries = simulate(scenario(latency={"step_ms": 3}))
    landings = [entry.t_ns for entry in entries if isinstance(entry.event, Landed)]
    assert landings == [3_000_000 * number for number in range(1, len(landings) + 1)]


def test_calls_are_taken_up_while_a_step_runs():
    entries = simulate(scenario(arrivals={"per_s": 300}, latency={"step_ms": 3}))
    running = False
    between = 0
    for entry in entries:
        running = isinstance(entry.event, Launched) or (running and not isinstance(entry.event, Landed))
        between += running and entry.event.__struct_config__.tag == "called"
    assert between > 5


def test_asynchronous_steps_run_one_after_the_other_on_the_device():
    entries = simulate(scenario(engine={"async_scheduling": True}, latency={"step_ms": 3}))
    landings = [entry.t_ns for entry in entries if isinstance(entry.event, Landed)]
    assert min(later - earlier for earlier, later in pairwise(landings)) == 3_000_000


# The trainer


def test_a_trainer_pauses_sends_its_parts_and_resumes():
    entries = simulate(scenario(rollouts=6, trainer={**TRAINER, "parts": 2}))
    calls = calls_of(entries, "trainer")
    assert [verb for _, verb in calls] == [
        "pause",
        "start_weight_update",
        "update_weights",
        "update_weights",
        "finish_weight_update",
        "resume",
    ]
    started, first, second, finish = (t_ns for t_ns, _ in calls[1:5])
    assert (first - started, second - first, finish - second) == (1_500_000, 1_500_000, 0)
    ended = max(t_ns for t_ns, _ in finished(entries))
    assert calls[0][0] == ended + 5_000_000


def test_training_begins_as_soon_as_a_batch_has_ended():
    entries = simulate(scenario(trainer=TRAINER))
    sixth = finished(entries)[5][0]
    assert calls_of(entries, "trainer")[0][0] == sixth + 5_000_000


def test_a_trainer_may_follow_the_steps_of_the_engine():
    entries = simulate(scenario(trainer={**{key: value for key, value in TRAINER.items() if key != "batch"}, "every_steps": 10}))
    steps = 0
    before_pause = []
    for entry in entries:
        steps += isinstance(entry.event, Launched)
        if entry.event.__struct_config__.tag == "called" and "pause" in entry.event.operation:
            before_pause.append(steps)
    assert len(before_pause) > 2
    assert all(10 <= later - earlier <= 16 for earlier, later in pairwise(before_pause))  # and 5 ms of training, at 1 ms a step


def test_hold_hands_in_no_more_than_the_bound_allows():
    entries = simulate(scenario(rollouts=40, arrivals={"workers": 40}, trainer={**TRAINER, "staleness": {"bound": 1, "beyond": "hold"}}))
    version, names, most = 0, set(), []
    for entry in entries:
        kind = entry.event.__struct_config__.tag
        version += kind == "committed"
        if kind == "called" and "submit" in entry.event.operation:
            names.add(rollout_of(entry.event.operation["submit"]["id"]))
            most.append(len(names) - (1 + version + 1) * 6)
    assert max(most) == 0
    assert len(names) == 40


def test_requests_salted_by_version_hit_no_block_of_an_older_one():
    def stale_hits(salted: bool) -> int:
        shared = scenario(engine={"num_blocks": 40}, samples=12, salt_by_version=salted, trainer={**TRAINER, "clear_cache": False})
        return _stale_hits(simulate(shared))

    assert stale_hits(salted=False) > 0
    assert stale_hits(salted=True) == 0


def _stale_hits(entries: list[Entry]) -> int:
    """Hits of a request's first admission on a block that was stored under an older version than it was handed in under."""
    version, stale = 0, 0
    stored: dict[int, int] = {}
    handed_in: dict[str, int] = {}
    for entry in entries:
        event = entry.event
        match event.__struct_config__.tag:
            case "committed":
                version += 1
            case "accepted":
                handed_in[event.request] = version
            case "stored":
                stored.update((block, version) for block, _ in event.blocks)
            case "hit" if event.request in handed_in:
                stale += any(stored[block] < handed_in[event.request] for block in event.blocks)
            case "admitted":
                handed_in.pop(event.request, None)
    return stale


# A timeline beside it


def test_a_timeline_acts_beside_the_workload_at_its_own_times():
    timeline = (
        TimelineEntry(operation=Submit(id="extra", prompt=Prompt(text="Hello"), max_tokens=4), when=When(ms=2.25), name="extra"),
        TimelineEntry(operation=IsPaused()),
        TimelineEntry(operation=Abort(ids="all"), when=When(request="extra", tokens=2, ms=0.5)),
    )
    entries = simulate(scenario(timeline=timeline, retry_ms=1))
    second = next(entry.t_ns for entry in entries if entry.event.__struct_config__.tag == "delivered" and _has(entry, "extra", 1))
    assert calls_of(entries, "timeline") == [(2_250_000, "submit"), (2_250_000, "is_paused"), (second + 500_000, "abort")]
    assert flaws(entries) == []
    assert closed(entries).unfired == ()
    assert len([event for _, event in finished(entries) if event.reason == "abort"]) == 7  # 6 workers' and `extra`


def _has(entry: Entry, request: str, index: int) -> bool:
    return any(output.request == request and output.first == index for output in entry.event.outputs)


def test_a_trigger_that_never_comes_true_is_told():
    timeline = (TimelineEntry(operation=Resume(), when=When(request="extra", state="preempted"), line=7),)
    assert closed(simulate(scenario(timeline=timeline))).unfired == ("line 7: resume",)


@pytest.mark.parametrize("late_requests", ["queue", "reject", "block"])
def test_a_pause_that_nobody_ends_ends_the_run(late_requests):
    timeline = (TimelineEntry(operation=Pause(mode="abort"), when=When(ms=4)),)
    entries = simulate(scenario(engine={"late_requests": late_requests}, timeline=timeline, retry_ms=1))
    assert closed(entries).why == "paused"
    assert flaws(entries) == []


def test_a_rejected_client_tries_again_at_its_own_pace():
    timeline = (
        TimelineEntry(operation=Pause(mode="keep", clear_cache=False), when=When(ms=4)),
        TimelineEntry(operation=Resume(), when=When(ms=10.5)),
    )
    entries = simulate(scenario(engine={"late_requests": "reject"}, arrivals={"per_s": 300}, timeline=timeline, retry_ms=3))
    refused = {entry.event.op: entry.t_ns for entry in entries if isinstance(entry.event, Returned) and entry.event.error}
    late = [submit["id"] for entry, submit in submits(entries) if entry.event.op in refused]
    assert late
    came = {submit["id"]: entry.t_ns for entry, submit in submits(entries)}
    for request in late:
        again = came[f"{rollout_of(request)}.1"]
        assert again >= 10_500_000
        assert (again - came[request]) % 3_000_000 == 0
        assert again - 10_500_000 < 3_000_000


# Ends


def test_ctrl_c_closes_the_log_as_interrupted():
    heard: list[Entry] = []

    def interrupt(entries: list[Entry]) -> None:
        heard.extend(entries)
        if any(isinstance(entry.event, Landed) for entry in entries):
            interrupts.append(1)
            if len(interrupts) == 5:
                raise KeyboardInterrupt

    interrupts: list[int] = []
    small = scenario()
    with pytest.raises(KeyboardInterrupt):
        Simulation(small, [interrupt]).run(simulate(small)[0].event)
    assert closed(heard).why == "interrupted"


def test_a_scenario_without_a_workload_is_refused():
    with pytest.raises(ValueError, match="has no workload: carry its timeline out"):
        Simulation(Scenario(name="bare", engine=EngineShape(), timeline=()), [])
