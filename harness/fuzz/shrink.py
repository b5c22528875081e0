"""Cuts a failing case down: fewer operations first, then simpler arguments, then a plainer engine.

What must stay is the *id* of what was found, so that one failure does not slide into another on the way. Removal is
delta debugging ("Simplifying and isolating failure-inducing input", Zeller and Hildebrandt, TSE 2002): ever smaller
runs of operations, as long as one can go. Handles make it sound: an operation means the same when others are gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from typing import Any

from harness.backends import Backend, LiveBackend
from harness.fuzz.case import API_TRUTH, ENDS, Case, Finding, Outcome, Signature, run_case
from harness.fuzz.generate import referring
from harness.operations import (
    Abort,
    Advance,
    FinishWeightUpdate,
    Operation,
    Pause,
    Prompt,
    StartWeightUpdate,
    Step,
    Submit,
    SwapWeights,
    UpdateWeights,
    UpdateWeightVersion,
    WeightSource,
)

SHRINK_S = 30.0
"""Seconds after which the smallest case so far is good enough."""

PLAIN_ENGINE: dict[str, Any] = {
    "late_requests": "queue",
    "long_prefill_token_threshold": 0,
    "prefix_caching": True,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "max_model_len": 40,
    "num_blocks": 12,
    "block_size": 4,
}
"""Roomy values: what still fails with one does not need the narrow one."""

Fails = Callable[[Case], bool]


def shrink(
    outcome: Outcome,
    id: str,
    backend: Backend | LiveBackend,
    *,
    known: Container[Signature] = (),
    explain: bool | None = None,
    hang_s: float | None = None,
    trying: Callable[[], object] = lambda: None,
) -> Outcome:
    """The smallest case found that still shows the finding `id`, as it ran; `outcome` itself if nothing can go.

    Args:
        known: failures that do not count, though they have this id.
        explain, hang_s: as `run_case` takes them.
        trying: called before each case that is tried.

    Raises:
        ValueError: the outcome does not show it.
    """
    original = outcome.finding(id, known)
    if original is None:
        raise ValueError(f"the case shows {[finding.id for finding in outcome.findings]}, not {id}")
    best = outcome

    def fails(case: Case) -> bool:
        nonlocal best
        trying()
        # How a case ends is judged under the drain; what else it shows, it must show by the operations written down.
        tried = run_case(case, backend, explain=explain, drain=id == ENDS, hang_s=hang_s)
        found = tried.finding(id, known)
        if found is None or not _same(original, found):
            return False
        best = tried
        return True

    shrink_case(outcome.case, fails, until=time.monotonic() + SHRINK_S)
    return best


def _same(original: Finding, found: Finding) -> bool:
    """One invariant is one failure; of crashes and hangs, which share an id, each is one of its own."""
    crashed = original.id == API_TRUTH and bool(original.detail)
    return not crashed or Signature.of(original) == Signature.of(found)


def shrink_case(case: Case, fails: Fails, *, until: float = float("inf")) -> Case:
    """The case with as much taken out as it can lose while it still `fails`; until `time.monotonic()` is `until`."""
    search = _Search(case, fails, until)
    before = None
    while before != search.case and not search.late:
        before = search.case
        search.fewer_operations()
        search.simpler_operations()
        search.plainer_engine()
    return search.case


class _Search:
    """The smallest failing case so far, and how to try a smaller one."""

    def __init__(self, case: Case, fails: Fails, until: float) -> None:
        self.case = case
        self._fails = fails
        self._until = until
        self._tried: set[tuple[object, ...]] = set()

    @property
    def late(self) -> bool:
        return time.monotonic() >= self._until

    def fewer_operations(self) -> None:
        self._try(_joined(self.case.operations))
        size = max(len(self.case.operations) // 2, 1)
        while size:
            at = len(self.case.operations)
            while at > 0:
                # From the end, so that what ends a run goes before what it is about.
                at = min(at, len(self.case.operations)) - size
                rest = self.case.operations
                self._try(rest[: max(at, 0)] + rest[max(at, 0) + size :])
            size //= 2

    def simpler_operations(self) -> None:
        index = 0
        while index < len(self.case.operations):
            operation = self.case.operations[index]
            simpler = next((one for one in _simpler(operation) if self._try_at(index, one)), None)
            if simpler is None:
                index += 1
        self._try(_renamed(self.case.operations))

    def plainer_engine(self) -> None:
        fields = self.case.engine.model_dump()
        for name, value in PLAIN_ENGINE.items():
            if fields[name] == value:
                continue
            try:
                shape = type(self.case.engine).model_validate({**self.case.engine.model_dump(), name: value})
            except ValueError:
                continue
            self._attempt(replace(self.case, engine=shape))

    def _try_at(self, index: int, operation: Operation) -> bool:
        operations = self.case.operations
        return self._try((*operations[:index], operation, *operations[index + 1 :]))

    def _try(self, operations: Sequence[Operation]) -> bool:
        return self._attempt(replace(self.case, operations=referring(operations)))

    def _attempt(self, candidate: Case) -> bool:
        key = (candidate.engine, candidate.operations)
        if candidate == self.case or key in self._tried or self.late:
            return False
        self._tried.add(key)
        if self._fails(candidate):
            self.case = candidate
            return True
        return False


def _joined(operations: Sequence[Operation]) -> list[Operation]:
    """Neighbouring steps as one operation."""
    joined: list[Operation] = []
    for operation in operations:
        count = _step_count(operation)
        if count and joined and (before := _step_count(joined[-1])):
            joined[-1] = Advance(steps=before + count)
        else:
            joined.append(operation)
    return joined


def _step_count(operation: Operation) -> int:
    if isinstance(operation, Step):
        return 1
    return operation.steps or 0 if isinstance(operation, Advance) else 0


def _renamed(operations: Sequence[Operation]) -> list[Operation]:
    """Requests numbered in the order of their submission."""
    names: dict[str, str] = {}
    for operation in operations:
        if isinstance(operation, Submit):
            names.setdefault(operation.id, f"r{len(names) + 1}")
    return [_rename(operation, names) for operation in operations]


def _rename(operation: Operation, names: dict[str, str]) -> Operation:
    if isinstance(operation, Submit):
        return operation.model_copy(update={"id": names[operation.id]})
    if isinstance(operation, Abort) and operation.ids != "all":
        return Abort(ids=tuple(names[id] for id in operation.ids))
    return operation


def _simpler(operation: Operation) -> Iterator[Operation]:
    """Simpler operations of the same kind, the boldest first; each is closer to the defaults or to 1."""
    match operation:
        case Submit():
            yield from _changed(operation, cache_salt=None)
            yield from (operation.model_copy(update={"prompt": prompt}) for prompt in _simpler_prompts(operation.prompt))
            yield from (operation.model_copy(update={"max_tokens": count}) for count in _fewer(operation.max_tokens))
        case Advance(steps=int(steps)):
            yield from (Step() if count == 1 else Advance(steps=count) for count in _fewer(steps))
        case Abort(ids=tuple(ids)) if len(ids) > 1:
            yield from (Abort(ids=ids[:index] + ids[index + 1 :]) for index in range(len(ids)))
        case Pause():
            yield from _changed(operation, clear_cache=False)
        case UpdateWeights():
            yield from _changed(operation, part=1, of=1)
            yield from _changed(operation, fails=False)
            yield from _changed(operation, source=_ORIGINAL)
        case SwapWeights():
            yield from _changed(operation, fails=False)
            yield from _changed(operation, version=None)
            yield from _changed(operation, source=_ORIGINAL)
        case FinishWeightUpdate():
            yield from _changed(operation, fails=False)
            yield from _changed(operation, version=None)
        case StartWeightUpdate():
            yield from _changed(operation, fails=False)
            yield from _changed(operation, allow_unpaused=False)
        case UpdateWeightVersion():
            yield from _changed(operation, allow_unpaused=False)
        case _:
            pass


def _simpler_prompts(prompt: Prompt) -> Iterator[Prompt]:
    yield from _changed(prompt, prefix=None)
    yield from _changed(prompt, seed=0)
    if isinstance(prompt.tokens, int):
        yield from (prompt.model_copy(update={"tokens": count}) for count in _fewer(prompt.tokens))
    if prompt.prefix is not None:
        fewer = (prompt.prefix.model_copy(update={"tokens": count}) for count in _fewer(prompt.prefix.tokens))
        yield from (prompt.model_copy(update={"prefix": prefix}) for prefix in fewer)


def _changed(data: Any, **fields: Any) -> Iterator[Any]:
    """The data with these fields, if that is another."""
    if any(getattr(data, name) != value for name, value in fields.items()):
        yield data.model_copy(update=fields)


def _fewer(count: int) -> Iterator[int]:
    """1, then halves, then one less."""
    yield from sorted({1, count // 2, count - 1} - {0, count}) if count > 1 else ()


_ORIGINAL = WeightSource(original=True)
