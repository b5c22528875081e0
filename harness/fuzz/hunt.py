"""Runs case after case and sums up: the loop in which a process of a campaign, a test or a script looks for failures."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from harness.backends import Backend, LiveBackend
from harness.events import Returned
from harness.fuzz.case import CONFORMANCE, Finding, Outcome, Signature, run_case
from harness.fuzz.generate import case_of

HANG_S = 60.0
"""Seconds that an engine may take for one case; a case has some thirty operations."""
YOUNG_OBJECTS = 50_000
"""Objects that Python may make before it looks for garbage: a case's log is garbage all at once."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How cases are made and judged; the same for every case of a campaign."""

    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Fields of the engine's shape that are given, not drawn."""
    explain: bool | None = None
    """As `run_case` takes it."""
    hang_s: float = HANG_S


@dataclass(frozen=True, kw_only=True)
class Failed:
    """A case that failed."""

    seed: int
    findings: tuple[Finding, ...]
    """In the order in which they showed."""


@dataclass(kw_only=True)
class Tally:
    """What was done: a sum, to which others can be added."""

    cases: int = 0
    operations: int = 0
    """Operations and steps."""
    seconds: float = 0.0
    verbs: Counter[str] = field(default_factory=Counter)
    """How often each operation was asked for."""
    reached: Counter[str] = field(default_factory=Counter)
    """In how many cases each kind of event occurred, and each kind of refusal."""
    ended: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: Outcome) -> None:
        self.cases += 1
        self.operations += outcome.operations
        self.verbs.update([operation.verb for operation in outcome.case.operations])
        self.reached.update(_kinds(outcome))
        self.ended[outcome.ended] += 1

    def merge(self, other: Tally) -> None:
        self.cases += other.cases
        self.operations += other.operations
        self.seconds += other.seconds
        self.verbs += other.verbs
        self.reached += other.reached
        self.ended += other.ended


def _kinds(outcome: Outcome) -> set[str]:
    kinds = {type(entry.event) for entry in outcome.entries}
    names = {str(kind.__struct_config__.tag) for kind in kinds}
    refusals = {f"refused {entry.event.error.code}" for entry in outcome.entries if type(entry.event) is Returned and entry.event.error}
    return names | refusals


def primary(findings: Sequence[Finding], known: Container[Signature] = ()) -> Finding:
    """What a failing case is reported as: the first finding, but a new one before a known one, and then an invariant's, which says
    more than a difference from the model."""
    return min(findings, key=lambda finding: (Signature.of(finding) in known, finding.id == CONFORMANCE))


def hunt(
    backend: Backend | LiveBackend, seeds: Iterable[int], settings: Settings, *, until: float = float("inf")
) -> Iterator[tuple[int, Outcome]]:
    """Run the case of each seed, until `time.monotonic()` is `until`; at least one. Yields seed and outcome.

    Raises:
        BackendError: the engine cannot be started.
    """
    verbs = getattr(backend, "verbs", None)
    with _little_garbage_collection():
        for seed in seeds:
            case = case_of(seed, engine=settings.overrides, verbs=verbs)
            yield seed, run_case(case, backend, explain=settings.explain, hang_s=settings.hang_s)
            if time.monotonic() >= until:
                return


@contextmanager
def _little_garbage_collection() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], YOUNG_OBJECTS), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
