"""What a step costs."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from harness.events import Scheduled
from harness.scenario import Latency
from harness.simulation.latency import step_cost

ROOFLINE = {"weights_gb": 16, "kv_kb_per_token": 128, "gflop_per_token": 16, "memory_gb_per_s": 4000, "compute_tflop_per_s": 1000}


def cost_ns(rows: list[tuple[int, int]], **changes: float) -> int:
    """Of a batch of (first, count) under the roofline."""
    cost = step_cost(Latency.model_validate({"roofline": {**ROOFLINE, **changes}}))
    return cost([Scheduled(f"r{index}", *row) for index, row in enumerate(rows)])


def test_a_constant_step_costs_the_same_whatever_its_batch():
    cost = step_cost(Latency(step_ms=2.5))
    assert cost([]) == cost([Scheduled("r1", 0, 500)]) == 2_500_000


def test_a_lone_decode_costs_reading_the_weights_and_its_kv():
    assert cost_ns([(999, 1)]) == 4_000_000 + 1000 * 32  # 16 GB at 4 TB/s; 128 kB a token at 4 TB/s


def test_every_request_of_a_batch_reads_its_own_kv_and_the_weights_are_read_once():
    assert cost_ns([(999, 1), (499, 1)]) == 4_000_000 + 1500 * 32


def test_a_long_prefill_costs_what_it_computes():
    assert cost_ns([(0, 2000)]) == 2000 * 16_000  # 16 GFLOP at 1,000 TFLOP/s


def test_the_launch_comes_on_top():
    assert cost_ns([(0, 2000)], launch_us=300) - cost_ns([(0, 2000)]) == 300_000


@pytest.mark.parametrize(
    ("field", "value"), [("memory_gb_per_s", 0), ("weights_gb", -1), ("compute_tflop_per_s", float("inf")), ("launch_us", float("nan"))]
)
def test_figures_that_no_machine_has_are_refused(field: str, value: float):
    with pytest.raises(ValidationError, match=field):
        cost_ns([], **{field: value})


def test_a_step_has_one_cost():
    with pytest.raises(ValidationError, match="`step_ms` or `roofline`, not both"):
        Latency.model_validate({"step_ms": 2, "roofline": ROOFLINE})
