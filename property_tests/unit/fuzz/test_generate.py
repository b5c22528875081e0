"""Cases are the same everywhere, reach what matters, and can be shrunk by hypothesis as well as by us."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import hypothesis
import pytest
from hypothesis import given, settings

from harness import cases
from harness.backends.sim import SimBackend
from harness.coverage import Situations
from harness.fuzz.case import Case
from harness.fuzz.draws import Stream, between, once_in
from harness.fuzz.generate import case_of, referring
from harness.fuzz.hunt import Settings, Tally, hunt
from harness.operations import OPERATIONS, Abort, Pause, Prompt, Submit

ROOT = Path(__file__).parents[3]


def tally(count: int) -> Tally:
    total = Tally()
    for _, outcome in hunt(SimBackend(), range(count), Settings()):
        assert outcome.clean, outcome.findings
        total.add(outcome)
    return total


def test_a_seed_gives_the_same_case_in_another_process_with_another_hash_seed():
    script = "from harness.fuzz.generate import case_of; print(*map(repr, map(case_of, range(20))), sep='\\n')"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "77"}
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert other.stdout.splitlines() == [repr(case_of(seed)) for seed in range(20)]


def test_a_stream_is_fair_and_seeds_differ():
    stream = Stream(1)
    counts = Counter(stream.below(7) for _ in range(7000))
    assert set(counts) == set(range(7))
    assert all(850 < count < 1150 for count in counts.values()), counts
    assert len({tuple(map(Stream(seed).below, [1000] * 3)) for seed in range(200)}) == 200
    assert all(2 <= between(stream, 2, 4) <= 4 for _ in range(50))
    assert 60 < sum(once_in(stream, 8) for _ in range(800)) < 140


def test_every_operation_is_asked_for_and_every_situation_of_a_control_plane_arises():
    total = tally(400)
    assert {"submit", "abort", "step", "advance", "pause", "resume", "is_paused", "reset_prefix_cache"} <= set(total.verbs)
    assert {"start_weight_update", "update_weights", "finish_weight_update", "swap_weights", "update_weight_version"} <= set(total.verbs)
    assert {"sleep", "wake_up", "is_sleeping"} <= set(total.verbs)
    rare = {
        "preempted",
        "hit",
        "blocked",
        "update_failed",
        "refused superseded",
        "refused out-of-service",
        "refused busy",
        "refused failed",
        "asleep",
        "awake",
        "offloaded",
        "loaded",
    }
    assert all(total.reached[name] >= 0.03 * total.cases for name in rare | {"refused rejected", "refused conflict"}), total.reached
    assert total.reached["launched"] > 0.85 * total.cases
    assert total.ended == {"drained": total.cases}


def test_pools_are_small_and_requests_few():
    for seed in range(200):
        case = case_of(seed)
        assert 4 <= case.engine.num_blocks <= 12
        assert len({one.id for one in case.operations if isinstance(one, Submit)}) <= 6


def test_a_swarm_case_leaves_operations_out():
    kinds = [{operation.verb for operation in case_of(seed).operations} for seed in range(200)]
    assert sum("pause" not in verbs for verbs in kinds) > 20
    assert sum(len(verbs) >= 9 for verbs in kinds) > 20


def test_what_is_given_is_not_drawn_and_unknown_operations_are_not_asked_for():
    verbs = frozenset({"submit", "step", "advance", "pause", "resume"})
    for seed in range(30):
        case = case_of(seed, engine={"block_size": 16, "late_requests": "block"}, verbs=verbs)
        assert (case.engine.block_size, case.engine.late_requests) == (16, "block")
        assert {operation.verb for operation in case.operations} <= verbs
        assert case.engine.host_blocks == 0, "an engine that does not know every operation has no host tier"


def test_bad_tensors_are_sent_to_engines_that_know_every_operation_and_to_no_others():
    def spoilt(verbs: frozenset[str] | None) -> int:
        sources = (getattr(one, "source", None) for seed in range(100) for one in case_of(seed, verbs=verbs).operations)
        return sum(source is not None and source.spoil is not None for source in sources)

    assert spoilt(None) > 10
    assert spoilt(frozenset(OPERATIONS) - {"sleep", "wake_up", "is_sleeping"}) == 0


def test_requests_live_through_several_updates():
    reached: Counter[str] = Counter()
    for _, outcome in hunt(SimBackend(), range(200), Settings()):
        situations = Situations()
        situations.feed(outcome.entries)
        reached.update(situations.counts.keys())
    assert reached["kv-of-three-epochs"] >= 6 and reached["request-across-two-boundaries"] >= 8 and reached["loaded-older-epoch"] >= 1, (
        reached
    )


def test_aborts_of_requests_that_nobody_submits_are_dropped():
    submit = Submit(id="r1", prompt=Prompt(tokens=2))
    assert referring([submit, Abort(ids=("r1", "r2")), Abort(ids=("r3",)), Abort(ids="all")]) == (
        submit,
        Abort(ids=("r1",)),
        Abort(ids="all"),
    )


@settings(max_examples=30)
@given(case=cases())
def test_hypothesis_draws_cases_that_are_scenarios(case: Case):
    assert [entry.operation for entry in case.scenario("drawn").timeline] == list(case.operations)


def test_hypothesis_shrinks_a_case_to_what_matters():
    def clears_under_keep(case: Case) -> bool:
        return any(isinstance(one, Pause) and one.mode == "keep" and one.clear_cache for one in case.operations)

    smallest = hypothesis.find(cases(), clears_under_keep, settings=settings(max_examples=200, database=None, derandomize=True))
    assert len(smallest.operations) <= 8, smallest.operations


def test_a_given_field_that_makes_no_engine_is_refused():
    with pytest.raises(ValueError, match="block_size"):
        case_of(0, engine={"block_size": 0})
