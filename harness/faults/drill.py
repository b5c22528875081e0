"""The drill: plants each fault and looks for it as one looks for a failure that nobody knows of.

A fault of the engine is hunted with the random cases of the fuzzer, from several seeds; one of the ranks with the
explorer. What counts is that the invariant which the fault names is violated: others may be, too, but do not make
up for it. Beside that, the engine without faults is put to the very same cases and must come out clean, and the
canary must be found: if it is not, the rest proves nothing.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median, quantiles
from typing import Any, Literal, NamedTuple
from unittest import mock

from harness.backends import Backend, Recomputes, make_backend
from harness.errors import BadInput
from harness.events import Called, Closed, Entry, Launched
from harness.faults import CANARY, FAULTS
from harness.faults.fault import CONFORMANCE, Fault
from harness.fuzz.case import API_TRUTH, ENDS, Case, Outcome, run_case
from harness.fuzz.generate import case_of
from harness.fuzz.shrink import SHRINK_S, shrink_case
from harness.invariants import judge
from harness.model.symbolic import symbolic_token
from harness.operations import Prompt, Step, Submit
from harness.ranks import shapes
from harness.scenario import Expect, Scenario

SEEDS = 5
"""Hunts for each engine fault: enough for a median and an idea of the tail."""
MOST_OPERATIONS = 20_000
"""Operations after which a hunt gives up. A fault is caught if most of its hunts are over before: by the median."""
SHALLOW_OPERATIONS = 200
"""What the median of a shallow fault must stay below."""
RANKS = 2
THIRDS = range(1, 4)
GOLDEN = "golden"
"""The invariant that needs real numbers, and an oracle that computes them again."""

_CASES_A_SEED = 1_000_000
_ONE_STEP = Submit(id="r0", prompt=Prompt(tokens=1), max_tokens=1), Step()

Status = Literal["caught", "missed", "other", "slow"]


class Hunt(NamedTuple):
    """One search for one fault."""

    cases: int
    """Cases of its seed that were run; shapes, for ranks."""
    operations: int
    """Operations and steps until the named invariant was violated, or MOST_OPERATIONS if the hunt gave up; the moves of
    the shortest counterexample, for ranks."""
    caught: bool
    also: tuple[str, ...]
    """What else was found on the way."""


@dataclass(frozen=True, kw_only=True)
class Drilled:
    """What came of one fault."""

    fault: Fault
    hunts: tuple[Hunt, ...]
    length: int | None = None
    """Operations of the smallest case that shows it, None if nobody asked; for ranks, moves of the shortest counterexample."""
    minimal: Scenario | None = None
    """The smallest case as a scenario that expects just that; None if nobody asked, and for ranks."""

    @property
    def status(self) -> Status:
        if 2 * sum(hunt.caught for hunt in self.hunts) <= len(self.hunts):
            return "other" if self.also else "missed"
        if self.fault.caught_by == CONFORMANCE and self.also:
            return "other"  # it claims that no promise is broken
        return "slow" if self.fault.shallow and self.median >= SHALLOW_OPERATIONS else "caught"

    @property
    def operations(self) -> list[int]:
        return [hunt.operations for hunt in self.hunts]

    @property
    def median(self) -> int:
        return round(median(self.operations))

    @property
    def p90(self) -> int:
        return round(quantiles(self.operations, n=10, method="inclusive")[-1]) if len(self.hunts) > 1 else self.operations[0]

    @property
    def also(self) -> tuple[str, ...]:
        return tuple(sorted({id for hunt in self.hunts for id in hunt.also}))


@dataclass(frozen=True, kw_only=True)
class Report:
    """What came of a drill."""

    drilled: tuple[Drilled, ...]
    unfaulted: tuple[str, ...]
    """What was found in the engine and in the ranks without faults: they are wrong, or an invariant is."""
    unfaulted_cases: int

    @property
    def void(self) -> bool:
        """The canary survived."""
        return any(one.fault.id == CANARY and not all(hunt.caught for hunt in one.hunts) for one in self.drilled)

    @property
    def passed(self) -> bool:
        return not self.void and not self.unfaulted and all(one.status == "caught" for one in self.drilled)


def chosen(ids: Sequence[str] = (), *, third: int | None = None) -> list[Fault]:
    """The faults to drill, the canary first and always among them.

    Args:
        ids: those named; none: all.
        third: every third of them, from the 1st, 2nd or 3rd on.

    Raises:
        BadInput: no such fault, or no such third.
    """
    if unknown := [id for id in ids if id not in FAULTS]:
        raise BadInput(f"no fault {unknown[0]!r}; there are {', '.join(FAULTS)}")
    if third is not None and third not in THIRDS:
        raise BadInput(f"--third {third}: expected {', '.join(map(str, THIRDS))}")
    faults = [FAULTS[id] for id in ids or FAULTS if id != CANARY]
    return [FAULTS[CANARY], *(faults if third is None else faults[third - 1 :: len(THIRDS)])]


def drill(
    faults: Sequence[Fault], *, seeds: int = SEEDS, minimal: bool = False, hear: Callable[[Drilled], object] = lambda drilled: None
) -> Report:
    """Hunt each fault, then run the engine without faults through the same cases.

    Args:
        seeds: hunts for each fault.
        minimal: cut the first case that catches a fault down to the smallest that does.
        hear: told of each fault when its hunts are over.

    Raises:
        BackendError: the engine cannot be had.
    """
    backend = make_backend("torch")
    grounds = Ground(backend, numbers=False), Ground(backend, numbers=True)
    drilled = []
    for fault in faults:
        ground = grounds[fault.caught_by == GOLDEN]
        drilled.append(_drill_ranks(fault) if fault.mutates == "ranks" else ground.drill(fault, seeds=seeds, minimal=minimal))
        hear(drilled[-1])
    found = [sentence for ground in grounds for sentence in ground.without_faults()]
    found += _ranks_without_faults(drilled)
    return Report(drilled=tuple(drilled), unfaulted=tuple(found), unfaulted_cases=sum(sum(ground.cases.values()) for ground in grounds))


class Grounds(NamedTuple):
    """Where a hunt's cases come from."""

    seed: int
    engine: tuple[tuple[str, Any], ...]
    """Fields of the engine's shape that are given, not drawn."""


class Shown(NamedTuple):
    """What a case showed."""

    case: Case
    """As it was carried out."""
    operations: int
    found: dict[str, tuple[int, str]]
    """By id: the number of operations until then, and a sentence."""


class Ground:
    """Where faults of the engine are hunted: the cases of the fuzzer on the engine `torch`.

    Args:
        numbers: run the network and have the oracle compute each token again. Otherwise tokens are made up, which is
            faster and hides no fault that lies elsewhere.
    """

    def __init__(self, backend: Backend, *, numbers: bool) -> None:
        self.cases: Counter[Grounds] = Counter()
        """The most cases that a hunt took, by its seed and by what was given of the engines."""
        self._backend = backend
        self._numbers = numbers

    def drill(self, fault: Fault, *, seeds: int, minimal: bool) -> Drilled:
        with self._entered(), fault.planted():
            hunts = [self._hunt(fault, Grounds(seed, fault.engine)) for seed in range(seeds)]
            caught = next((shown.case for _, shown in hunts if shown is not None), None)
            small = self._shrunk(fault, caught) if minimal and caught is not None else None
        drilled = Drilled(fault=fault, hunts=tuple(hunt for hunt, _ in hunts))
        return drilled if small is None else replace(drilled, length=len(small.operations), minimal=self._scenario(fault, small))

    def without_faults(self) -> Iterator[str]:
        """What is found in the cases of all hunts while nothing is planted."""
        with self._entered():
            for grounds, count in self.cases.items():
                for number in range(count):
                    shown = self._run(*_case(grounds, number), explain=True)
                    for id, (_, sentence) in shown.found.items():
                        yield f"case {_case(grounds, number)[0].seed} without a fault: {id}: {sentence}"

    def _hunt(self, fault: Fault, grounds: Grounds) -> tuple[Hunt, Shown | None]:
        cases = operations = 0
        also: set[str] = set()
        caught: Shown | None = None
        while caught is None and operations < MOST_OPERATIONS:
            shown = self._run(*_case(grounds, cases), explain=fault.caught_by == CONFORMANCE)
            cases += 1
            also |= shown.found.keys() - {fault.caught_by}
            if fault.caught_by in shown.found:
                caught = shown
            operations += shown.operations if caught is None else shown.found[fault.caught_by][0]
        self.cases[grounds] = max(self.cases[grounds], cases)
        return Hunt(cases, min(operations, MOST_OPERATIONS), caught is not None, tuple(sorted(also))), caught

    def _shrunk(self, fault: Fault, case: Case) -> Case:
        def fails(candidate: Case) -> bool:
            return fault.caught_by in self._run(candidate, False, explain=fault.caught_by == CONFORMANCE).found

        return shrink_case(case, fails, until=time.monotonic() + SHRINK_S)

    def _scenario(self, fault: Fault, case: Case) -> Scenario:
        """As a file of scenarios/failures/: under its fault it violates what it says; without it, it holds and ends as it says."""
        with self._entered():
            outcome = run_case(case, self._backend, explain=False, drain=False)
            if not any(isinstance(entry.event, Launched) for entry in outcome.entries):
                # A run without a step holds nothing, for it shows nothing.
                case = replace(case, operations=(*_ONE_STEP, *case.operations))
                outcome = run_case(case, self._backend, explain=False, drain=False)
            with fault.planted():
                found = self._run(case, False, explain=False).found
        name = re.split(r"[.;:]( |$)", fault.says, maxsplit=1)[0]
        expect = Expect.model_validate({"ends": outcome.ended, "violates": tuple(sorted(found.keys() - {CONFORMANCE}))})
        return replace(case.scenario(f"{name[0].lower()}{name[1:]}", expect=expect), fault=fault.id)

    def _run(self, case: Case, drain: bool, *, explain: bool) -> Shown:
        """Not counted: that an engine crashed, for no invariant saw that, and how its case ended, of which invariants speak."""
        outcome = run_case(case, self._backend, explain=explain, drain=drain)
        closed = outcome.entries[-1].event
        crashed = isinstance(closed, Closed) and closed.cut_short
        findings = [one for one in outcome.findings if one.id != ENDS and not (crashed and one.detail and one.id == API_TRUTH)]
        found = {one.id: (one.operations, one.sentence) for one in reversed(findings)}
        if self._numbers and not crashed:
            found |= _golden(outcome, self._backend)
        return Shown(outcome.case, outcome.operations, found)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        with _one_model():
            if self._numbers:
                yield
            else:
                with _made_up_tokens():
                    yield


def _case(grounds: Grounds, number: int) -> tuple[Case, bool]:
    """A case of a hunt, and whether it is drained at its end: some faults show only while nobody resumes the engine."""
    return case_of(grounds.seed * _CASES_A_SEED + number, engine=dict(grounds.engine)), number % 2 == 0


def _golden(outcome: Outcome, backend: Backend) -> dict[str, tuple[int, str]]:
    """What the oracle makes of a case."""
    assert isinstance(backend, Recomputes), backend
    *entries, closed = outcome.entries
    references = [Entry(closed.seq + at, closed.t_ns, closed.writer, event) for at, event in enumerate(backend.references(entries))]
    (judgement,) = judge([*entries, *references, closed], [GOLDEN])
    if not judgement.violations:
        return {}
    first = judgement.violations[0]
    operations = sum(isinstance(entry.event, Called | Launched) for entry in entries if entry.seq <= first.seq)
    return {GOLDEN: (operations, first.sentence)}


def _drill_ranks(fault: Fault) -> Drilled:
    """Every order of every shape, until one of them is bad."""
    with fault.planted():
        for number, shape in enumerate(shapes.SHAPES, start=1):
            found = shapes.explore(shape, RANKS).violation
            if found is not None:
                caught = found.invariant == fault.caught_by
                hunt = Hunt(number, len(found.steps), caught, () if caught else (found.invariant,))
                return Drilled(fault=fault, hunts=(hunt,), length=len(found.steps))
    return Drilled(fault=fault, hunts=(Hunt(len(shapes.SHAPES), 0, False, ()),))


def _ranks_without_faults(drilled: Sequence[Drilled]) -> Iterator[str]:
    """The shapes that it took to find the faults of the ranks, under the correct protocol."""
    needed = max((one.hunts[0].cases for one in drilled if one.fault.mutates == "ranks"), default=0)
    for shape in list(shapes.SHAPES)[:needed]:
        found = shapes.explore(shape, RANKS)
        if found.violation is not None:
            yield f"shape {shape} without a fault: {found.violation.invariant}: {found.violation.sentence}"
        elif not found.exhaustive:
            yield f"shape {shape} without a fault: not exhausted, {found.states} states entered"


@contextmanager
def _made_up_tokens() -> Iterator[None]:
    """In place of the forward pass."""
    from engine.model_runner import ModelRunner
    from engine.sampler import SampledToken

    class MadeUp:
        def __init__(self, batch: Sequence[Any]) -> None:
            self._tokens = [symbolic_token(share.request.request_id, share.end, 0) for share in batch if share.samples]

        def wait(self) -> list[SampledToken]:
            return [SampledToken(token, None) for token in self._tokens]

    with mock.patch.object(ModelRunner, "launch", lambda self, batch, copies: MadeUp(batch)):
        yield


@contextmanager
def _one_model() -> Iterator[None]:
    """Load the checkpoint once for all cases, and give each its original weights: loading takes longer than a case."""
    from engine import model_runner

    load, loaded = model_runner.load_model, {}

    def load_once(config: Any, device: Any) -> Any:
        key = (config.checkpoint, config.dtype, device)
        if key not in loaded:
            model = load(config, device)
            loaded[key] = model, {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model, original = loaded[key]
        for name, tensor in model.state_dict().items():
            tensor.untyped_storage().resize_(original[name].untyped_storage().nbytes())  # the case before may have ended asleep
        model.load_state_dict(original)
        return model

    with mock.patch.object(model_runner, "load_model", load_once):
        yield
