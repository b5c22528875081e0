"""Figures are a function of the log: what they count, and how a report tells it."""

from __future__ import annotations

import pytest

from harness.events import Landed, Launched
from harness.simulation.figures import Figures, figures_of
from reports.simulation import figure_lines, percentile

from .runs import TRAINER, calls_of, delivered, finished, scenario, simulate, submits


def figures(**workload) -> Figures:
    small = scenario(**workload)
    assert small.workload is not None
    return figures_of(simulate(small), small.workload)


def test_tokens_steps_and_rollouts_are_those_of_the_log():
    small = scenario(trainer=TRAINER)
    entries = simulate(small)
    assert small.workload is not None
    found = figures_of(entries, small.workload)
    assert found.steps == sum(isinstance(entry.event, Landed) for entry in entries)
    assert found.tokens == sum(delivered(entries).values())
    assert found.rollouts == len(found.latencies_ns) == len(found.first_tokens_ns) == 24
    assert found.computed == sum(row.count for entry in entries if isinstance(entry.event, Launched) for row in entry.event.batch)


def test_a_rollout_counts_from_its_first_request_to_its_last_token():
    small = scenario(rollouts=1, retry_ms=1, arrivals={"workers": 1}, trainer={**_every(4), "mode": "abort"})
    entries = simulate(small)
    assert small.workload is not None
    [latency] = figures_of(entries, small.workload).latencies_ns
    assert len(submits(entries)) > 1
    assert latency == finished(entries)[-1][0] - submits(entries)[0][0].t_ns


def test_the_time_held_is_that_of_the_transfers():
    found = figures(trainer=TRAINER)
    assert (found.updates, found.held_ns) == (4, 4 * 3_000_000)


def test_waiting_drains_and_keeping_does_not():
    wait, keep = (figures(latency={"step_ms": 1}, trainer={**TRAINER, "mode": mode, "batch": 3}) for mode in ("wait", "keep"))
    assert wait.draining_ns > 5 * keep.draining_ns
    assert keep.draining_ns <= keep.updates * 1_000_000  # the step in flight


def test_a_clear_has_tokens_computed_again_and_a_kept_cache_has_not():
    roomy = {"num_blocks": 200}
    kept, cleared = (figures(engine=roomy, trainer={**TRAINER, "clear_cache": clear}) for clear in (False, True))
    assert (kept.recomputed, kept.preemptions) == (0, 0)
    assert cleared.recomputed > 0
    assert cleared.computed - cleared.recomputed <= kept.computed


def test_staleness_is_counted_for_every_rollout_trained_on():
    found = figures(rollouts=26, trainer={**TRAINER, "train_ms": 1})
    assert sum(found.staleness.values()) == 24  # 2 are left over
    assert max(found.staleness) >= 1


def test_a_bound_drops_what_is_older_and_trains_on_the_rest():
    quick = {**TRAINER, "batch": 4, "train_ms": 1}
    free, bound = (
        figures(rollouts=60, output={"median": 6, "p99": 34}, trainer=trainer)
        for trainer in (quick, {**quick, "staleness": {"bound": 1, "beyond": "drop"}})
    )
    assert max(free.staleness) > 1
    assert max(bound.staleness) <= 1
    assert bound.dropped > 0
    assert bound.dropped + sum(bound.staleness.values()) <= 60


def test_without_batches_staleness_is_that_at_the_end():
    found = figures(trainer=_every(5))
    assert sum(found.staleness.values()) == 24
    assert found.trained_tokens == 0


def test_figures_of_a_trainer_are_those_that_it_decided_by():
    """The ledger takes the same batches afterwards as the trainer did: as many updates as pauses, none of an empty batch."""
    small = scenario(rollouts=60, trainer={**TRAINER, "batch": 5, "staleness": {"bound": 0, "beyond": "drop"}})
    assert small.workload is not None
    entries = simulate(small)
    found = figures_of(entries, small.workload)
    pauses = [verb for _, verb in calls_of(entries, "trainer")].count("pause")
    assert sum(found.staleness.values()) == 5 * pauses == 5 * found.updates
    assert found.dropped > 0


def test_percentiles_are_values_that_occurred():
    assert [percentile([1, 2, 3, 4], percent) for percent in (1, 50, 51, 99, 100)] == [1, 2, 3, 4, 4]
    assert percentile([7], 50) == 7


@pytest.mark.parametrize("trainer", [None, TRAINER, {**TRAINER, "batch": 1, "train_ms": 0.5}])
def test_a_report_tells_it_in_a_few_lines_that_fit_a_screen(trainer):
    lines = figure_lines(figures(rollouts=40, trainer=trainer), margin=15)
    assert [line.split()[0] for line in lines] == ["simulated", "rollouts", *(["updates", "staleness"] if trainer else []), "recomputed"]
    assert all(len(line) <= 118 for line in lines)


def test_a_workload_that_took_no_time_has_a_report():
    assert figure_lines(Figures(rollouts=0), margin=15)[0] == "simulated      0.000 s in 0 steps: 0 tokens, no time passed"


def _every(steps: int) -> dict:
    return {**{key: value for key, value in TRAINER.items() if key != "batch"}, "every_steps": steps}
