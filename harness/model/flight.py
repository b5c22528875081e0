"""A step between its launch and its landing."""

from __future__ import annotations

from typing import NamedTuple

from harness.model.request import Request


class Flight(NamedTuple):
    """What has to be known when the step lands, whatever happens in between."""

    step: int
    epoch: int
    version: str
    """Epoch and label of the weights that it runs on."""
    samplers: list[Request]
    """Those for which it samples a token, in scheduling order; they may end or be preempted meanwhile."""
