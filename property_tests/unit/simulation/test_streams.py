"""What is drawn has the distribution that the scenario asks for, and each use has a stream of its own."""

from __future__ import annotations

import pytest

from harness.scenario import Tail
from harness.simulation.streams import gap_ns, length, stream, uniform


def test_streams_of_one_seed_differ_by_name_and_repeat():
    draws = {name: [uniform(stream(3, name)) for _ in range(2)] for name in ("ties", "arrivals", "prompts", "outputs")}
    assert len({first for first, _ in draws.values()}) == 4
    assert all(first == again for first, again in draws.values())


def test_lengths_have_the_median_and_the_99th_percentile_asked_for():
    draws = stream(0, "outputs")
    lengths = sorted(length(draws, Tail(median=500, p99=5000)) for _ in range(20_000))
    assert lengths[10_000] == pytest.approx(500, rel=0.03)
    assert lengths[19_800] == pytest.approx(5000, rel=0.08)
    assert lengths[0] >= 1


def test_the_longest_rollouts_hold_a_large_share_of_the_tokens():
    draws = stream(1, "outputs")
    lengths = sorted(length(draws, Tail(median=500, p99=5000)) for _ in range(20_000))
    assert sum(lengths[-1000:]) / sum(lengths) == pytest.approx(0.25, abs=0.03)  # for a lognormal: Phi(sigma - z(0.95))


def test_equal_percentiles_give_one_length():
    draws = stream(0, "outputs")
    assert {length(draws, Tail(median=7, p99=7)) for _ in range(100)} == {7}


def test_gaps_of_a_poisson_process_have_the_mean_of_its_rate_and_the_spread_of_its_mean():
    draws = stream(0, "arrivals")
    gaps = [gap_ns(draws, 20) for _ in range(20_000)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(50e6, rel=0.03)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.03)
