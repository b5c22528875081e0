"""A chunk of a prefill that does not reach the prompt's end samples a token."""

from __future__ import annotations

from harness.faults.fault import Patch

STANDS_FOR = "the kind of K01: tokens shifted"
CAUGHT_BY = "token-conservation"
SHALLOW = True


def plant(patch: Patch) -> None:
    from engine.scheduler import ScheduledTokens

    patch(ScheduledTokens, "samples", property(lambda self: True))
