"""What Prometheus reads: the engine's counters as they are at the scrape, and how long weight operations took."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import get_args

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ..messages import EngineCounters
from ..outputs import PauseMode

PREFIX = "caesura:"


class Metrics:
    """The metrics of one server; names are vLLM's, where it has them, but for the prefix."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._weight_operations = Histogram(
            PREFIX + "weight_operation_seconds",
            "How long calls of the weight session took; failed ones too.",
            ["operation", "outcome"],
            registry=self._registry,
            buckets=(0.001, 0.01, 0.1, 0.5, 1, 5, 10, 30, 60, 120),
        )

    @contextmanager
    def weight_operation(self, operation: str) -> Iterator[None]:
        """Measure `init`, `start`, `update` or `finish`."""
        began, outcome = perf_counter(), "failed"
        try:
            yield
            outcome = "done"
        finally:
            self._weight_operations.labels(operation, outcome).observe(perf_counter() - began)

    def render(self, counters: EngineCounters) -> bytes:
        """Prometheus' text format."""
        scrape = CollectorRegistry()
        scrape.register(_Snapshot(counters))
        return generate_latest(scrape) + generate_latest(self._registry)


class _Snapshot:
    """The engine's counters as a collector."""

    def __init__(self, counters: EngineCounters) -> None:
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        now = self._counters
        used = 1 - now.free_blocks / now.num_blocks
        yield _gauge("num_requests_running", "Requests in the running batch.", now.running)
        yield _gauge("num_requests_waiting", "Accepted requests that are not running.", now.waiting)
        yield _gauge("num_requests_parked", "Of those waiting, the ones that came while paused or out of service.", now.parked)
        yield _gauge("num_requests_blocked", "Requests held in front of the core by the late-request policy.", now.blocked)
        yield _gauge("kv_cache_usage_perc", "Share of KV blocks that requests hold, 0 to 1.", used)
        yield _counter("prompt_tokens", "Prompt tokens of accepted requests.", now.prompt_tokens)
        yield _counter("generation_tokens", "Generated tokens.", now.generated_tokens)
        yield _counter("prefix_cache_queries", "Tokens looked up in the prefix cache, by first admissions.", now.prefix_cache_queries)
        yield _counter("prefix_cache_hits", "Tokens found in the prefix cache, in whichever tier.", now.prefix_cache_hits)
        yield _counter("num_preemptions", "Requests sent back to waiting, for others or by a cache reset.", now.preemptions)
        yield _gauge("pause_pending", "1 while a pause has not taken effect.", now.pause_pending)
        yield _gauge("sleeping", "1 while anything is asleep.", now.sleeping)
        yield _gauge("weight_update_open", "1 while a weight session is open.", now.update_open)
        yield _gauge("out_of_service", "1 from a failed update until a full one.", now.out_of_service is not None)
        modes = {mode: now.pause_mode == mode for mode in get_args(PauseMode)}
        yield _labelled("paused", "1 for the mode of the pause in force or pending.", "mode", modes)
        yield _labelled("weight_version_info", "1 for the label of the resident weights.", "version", {now.weight_version: True})


def _gauge(name: str, about: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, about, value)


def _counter(name: str, about: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, about, value)


def _labelled(name: str, about: str, label: str, values: dict[str, bool]) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, about, labels=[label])
    for value, holds in values.items():
        family.add_metric([value], holds)
    return family
