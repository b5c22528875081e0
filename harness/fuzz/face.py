"""The public face for other people's engines: run operations, fuzz, and draw cases with hypothesis."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from harness.backends import Backend, make_backend
from harness.backends.yours import Engine, engine_backend
from harness.fuzz.case import Case, Finding, Outcome, run_case
from harness.fuzz.generate import generate
from harness.fuzz.hunt import HANG_S, Settings, primary
from harness.fuzz.hunt import hunt as hunt_seeds
from harness.fuzz.shrink import shrink
from harness.operations import Operation
from harness.scenario import EngineShape, dump

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

AnyEngine = str | Backend | Callable[[EngineShape], Engine]
"""A name that the command line knows, a backend, or a class of the protocol."""


class Found(AssertionError):
    """An engine failed a case. `outcome` is the smallest one that shows it, `scenario` the file that reproduces it."""

    def __init__(self, outcome: Outcome, finding: Finding) -> None:
        self.outcome = outcome
        self.finding = finding
        self.scenario = dump(outcome.case.scenario(f"{finding.id}, seed {outcome.case.seed}"))
        told = f"{finding.id}: {finding.sentence} (event {finding.seq}, after {finding.operations} operations)"
        super().__init__(f"{told}\n{finding.detail}\n{self.scenario}")


def run(engine: AnyEngine, case: Case | Sequence[Operation], *, shape: EngineShape | None = None, drain: bool = True) -> Outcome:
    """Put an engine to a case, or to operations one after the other, and judge it by every invariant.

    Args:
        shape: what the engine is started with, if `case` is a list of operations.
        drain: at the end, resume the engine and demand that every request ends.

    Raises:
        BackendError: the engine cannot be had, or lacks a method of the protocol.
    """
    if not isinstance(case, Case):
        case = Case(engine=shape or EngineShape(), operations=tuple(case))
    return run_case(case, _backend(engine), drain=drain, hang_s=HANG_S)


def hunt(engine: AnyEngine, *, cases: int = 200, seed: int = 0) -> int:
    """Run so many generated cases, the first of that seed; returns how many operations and steps were carried out.

    Raises:
        Found: a case failed; it was shrunk, and the error holds it as a scenario file.
        BackendError: as `run`.
    """
    backend = _backend(engine)
    operations = 0
    for _, outcome in hunt_seeds(backend, range(seed, seed + cases), Settings()):
        operations += outcome.operations
        if not outcome.clean:
            finding = primary(outcome.findings)
            small = shrink(outcome, finding.id, backend, hang_s=HANG_S)
            raise Found(small, small.finding(finding.id) or finding)
    return operations


def cases(*, engine: dict[str, Any] | None = None, verbs: frozenset[str] | None = None) -> SearchStrategy[Case]:
    """A hypothesis strategy for cases, drawn by the same generator as those of `hunt` and shrunk by hypothesis.

    Args:
        engine: fields of the engine's shape that are given, not drawn.
        verbs: the operations that the engine knows; None: all.
    """
    from hypothesis import strategies as st

    @st.composite
    def drawn(draw: Any) -> Case:
        return generate(_HypothesisDraws(draw), engine=engine, verbs=verbs)

    return drawn()


class _HypothesisDraws:
    """Choices that hypothesis makes, and makes smaller when a case fails."""

    def __init__(self, draw: Callable[[Any], Any]) -> None:
        self._draw = draw

    def below(self, bound: int) -> int:
        return self._draw(_below(bound))


def _below(bound: int) -> Any:
    from hypothesis import strategies as st

    return st.integers(0, bound - 1)


def _backend(engine: AnyEngine) -> Backend:
    if isinstance(engine, str):
        return make_backend(engine)
    if isinstance(engine, type) or not hasattr(engine, "apply"):
        return engine_backend(engine)  # type: ignore[arg-type]
    return engine  # type: ignore[return-value]
