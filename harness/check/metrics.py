"""What a server's Prometheus metrics tell of its queues and its prefix cache, whatever their prefix and labels."""

from __future__ import annotations

import re
from typing import NamedTuple

from harness.backends.http import Client, NoAnswer

RUNNING = ("num_requests_running", "num_running_reqs")
WAITING = ("num_requests_waiting", "num_queue_reqs")
HITS = ("prefix_cache_hits_total", "prefix_cache_hits")
"""Prompt tokens that were found in the prefix cache. vLLM's, ours and SGLang's names; a metric that is not there is unknown, not 0."""

_SAMPLE = re.compile(r"(?P<name>[a-zA-Z_:][\w:]*)(\{[^}]*\})? (?P<value>\S+)")


class Metrics(NamedTuple):
    """None for what the server does not tell."""

    running: float | None
    waiting: float | None
    hits: float | None

    @property
    def requests(self) -> float | None:
        """How many it is at work on or holds, everybody's."""
        known = [count for count in (self.running, self.waiting) if count is not None]
        return sum(known) if known else None


async def read_metrics(client: Client) -> Metrics:
    """Those of now. Raises Unreachable."""
    try:
        reply = await client.get("/metrics")
    except NoAnswer:
        return Metrics(None, None, None)
    return parse_metrics(reply.body if reply.ok and isinstance(reply.body, str) else "")


def parse_metrics(text: str) -> Metrics:
    """From Prometheus' text format, by names without prefix, summed over labels: those tell ranks and models apart."""
    samples = _samples(text)
    return Metrics(*(next((samples[name] for name in names if name in samples), None) for names in (RUNNING, WAITING, HITS)))


def _samples(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for match in map(_SAMPLE.match, text.splitlines()):
        if match is not None:
            name = match["name"].rpartition(":")[2]
            found[name] = found.get(name, 0.0) + float(match["value"])
    return found
