"""One case on one engine: carried out in lockstep, explained by the model, judged by every invariant.

It does what `caesura run` does with the same operations as a scenario without triggers, event for event, so that
a case that fails is a scenario file that fails; and it is quick, because finding rare failures takes many cases.
"""

from __future__ import annotations

import traceback
from bisect import bisect_right
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar

from harness.backends import Backend, LiveBackend, opened_event
from harness.conformance import Explainer
from harness.errors import BadInput
from harness.events import Called, Closed, Delivered, Entry, Event, Launched, Returned, StepFailed
from harness.execute import NS_PER_MS, EngineCrashed, Listener, crash_in
from harness.fuzz.watchdog import EngineHangs, watched
from harness.invariants import Judge
from harness.operations import (
    Abort,
    Advance,
    FinishWeightUpdate,
    Operation,
    Pause,
    Prompt,
    Resume,
    Step,
    Submit,
    SwapWeights,
    UpdateWeights,
    WakeUp,
    WeightSource,
    in_words,
    to_data,
)
from harness.scenario import EngineShape, Expect, Scenario
from harness.verdict import wording

Answer = TypeVar("Answer")

CONFORMANCE = "conformance"
"""In place of an invariant's id: the model does not explain what the engine did."""
API_TRUTH = "api-truth"
"""The engine died or hung."""
ENDS = "ends"
"""Brought back into service and resumed, the engine did not run its requests to their end."""

STEP_NS = NS_PER_MS
STALLED_STEPS = 100
"""Steps in a row that deliver nothing before a case is given up as stalled: prompts of 40 tokens need far fewer."""
MOST_PARTS = 3
"""A generated weight session is cut into at most so many parts."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """What an engine is put to: its shape, and operations one right after the other; only `step` and `advance` step."""

    engine: EngineShape
    operations: tuple[Operation, ...]
    seed: int = 0

    @classmethod
    def of(cls, scenario: Scenario) -> Case:
        """The case that does what the scenario does.

        Raises:
            BadInput: the scenario has triggers, which a case has not.
        """
        if any(entry.when is not None for entry in scenario.timeline):
            raise BadInput(
                f"{scenario.path or scenario.name}: expected operations one after the other, without `when`: a case has no triggers"
            )
        return cls(engine=scenario.engine, operations=tuple(entry.operation for entry in scenario.timeline))

    def scenario(self, name: str, *, expect: Expect | None = None) -> Scenario:
        """The same as a scenario.

        Raises:
            ScenarioError: an operation names a request that none submits.
        """
        return replace(Scenario.from_operations(self.engine, self.operations, name=name), expect=expect or Expect())


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong, the first time that it showed."""

    id: str
    """The violated invariant, or CONFORMANCE, API_TRUTH or ENDS."""
    operations: int
    """Operations and steps carried out until it showed."""
    seq: int
    """Number of the event at which it showed."""
    sentence: str
    expected: str = ""
    """What the invariant promises instead."""
    detail: str = ""
    """Where an engine died or hung: its stack."""


class Signature(NamedTuple):
    """What tells one failure from another."""

    id: str
    words: str
    """What it says and what was promised instead, without names of requests and versions, numbers and lists; as `wording` has it."""

    @classmethod
    def of(cls, finding: Finding) -> Signature:
        return cls(finding.id, wording(finding.sentence, finding.expected))


def distinct(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The first of each signature, in the order in which they showed."""
    first: dict[Signature, Finding] = {}
    for finding in sorted(findings, key=lambda finding: finding.seq):
        first.setdefault(Signature.of(finding), finding)
    return tuple(first.values())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a case."""

    case: Case
    """As it was carried out: what brought it to its end is among the operations."""
    findings: tuple[Finding, ...]
    """One for each signature, in the order in which they showed; empty if the case is clean."""
    operations: int
    """Operations and steps carried out."""
    ended: str
    """As `Closed.why` says; `crashed` if the engine raised or hung."""
    entries: Sequence[Entry] = field(repr=False)
    """The log."""

    @property
    def clean(self) -> bool:
        return not self.findings

    def finding(self, id: str, known: Container[Signature] = ()) -> Finding | None:
        """The first of that id that is not among the known ones."""
        return next((finding for finding in self.findings if finding.id == id and Signature.of(finding) not in known), None)


def run_case(
    case: Case,
    backend: Backend | LiveBackend,
    *,
    explain: bool | None = None,
    drain: bool = True,
    hang_s: float | None = None,
    listener: Listener | None = None,
) -> Outcome:
    """Put an engine to a case, from its start to its end.

    Args:
        explain: have the model explain every transaction and compare the whole visible state after each. By default of
            every engine that shows blocks and is not the model itself. A live engine's log is explained, if it shows them, in any case.
        drain: at the end, bring the engine back into service, resume it, and demand that every request ends.
        hang_s: give up on an engine that takes longer than this for the case, in seconds; None: wait for ever.
        listener: hears each transaction right after it happened.

    Raises:
        BackendError: the engine cannot be started.
    """
    if isinstance(backend, LiveBackend):
        from harness.fuzz.live import run_live_case

        return run_live_case(case, backend, drain=drain, listener=listener)
    if explain is None:
        explain = backend.level >= 2 and backend.name != "sim"
    run = _Run(case, backend, Explainer() if explain else None, listener)
    run.start()
    try:
        with watched(hang_s):
            run.carry_out(drain=drain)
    except EngineHangs as hang:
        told = f"in {run.during}: no answer within {hang_s:g} s"
        run.give_up(f"the engine hangs {told}", f"{told}: it hangs", hang)
    except EngineCrashed as crash:
        run.give_up(crashed(str(crash)), str(crash), crash.__cause__ or crash)
    finally:
        backend.stop()
    return run.outcome()


class _Run:
    """A case under way: the log so far, and where each operation and step begins in it."""

    def __init__(self, case: Case, backend: Backend, explainer: Explainer | None, listener: Listener | None) -> None:
        self.backend = backend
        self.explainer = explainer
        self.listener = listener
        self.during = ""
        """What the engine was asked last."""
        self._case = case
        self._performed: list[Operation] = []
        self._log: list[Entry] = []
        self._decoded: dict[int, Operation] = {}
        """The operation of each call in the log, by the identity of its data: decoding costs more than judging."""
        self._begins: list[int] = []
        self._now_ns = 0
        self._ops = 0
        self._stalled_steps = 0
        self._failed = False
        """A forward pass broke: the engine is not asked for more."""
        self._ended = ""
        self._findings: list[Finding] = []

    def start(self) -> None:
        info = self.backend.start(self._case.engine)
        self._write(opened_event(self._case.engine, self.backend, info, digest="", seed=self._case.seed))

    def carry_out(self, *, drain: bool) -> None:
        for operation in self._case.operations:
            self._perform(operation)
        if drain:
            for operation in back_into_service(self._refused, asleep=self._asleep):
                self._perform(operation)
        while self._steps_on():
            self._step()
        self._close("failed" if self._failed else self._why_idle())
        if drain and self._ended != "drained":
            self._find(ENDS, len(self._log) - 1, not_drained(self._ended, self._log))

    def _owed(self) -> Iterator[Submit]:
        """What a case that was cut short must hand in after all to be a scenario: requests that it aborts and did not submit."""
        named = {id for one in self._performed if isinstance(one, Abort) and one.ids != "all" for id in one.ids}
        missing = named - submitted(self._performed)
        for operation in self._case.operations:
            if isinstance(operation, Submit) and operation.id in missing:
                missing.remove(operation.id)
                yield operation

    def give_up(self, sentence: str, told: str, error: BaseException) -> None:
        self._find(API_TRUTH, len(self._log) - 1, sentence, "".join(traceback.format_exception(error)), operations=len(self._begins))
        self._close("crashed", told)

    def outcome(self) -> Outcome:
        judge = Judge(decode=lambda data: self._decoded[id(data)])
        judge.feed(self._log)
        for judgement in judge.finish():
            for violation in judgement.violations:
                self._find(judgement.invariant, violation.seq, violation.sentence, expected=violation.expected)
        return Outcome(
            case=replace(self._case, operations=(*self._performed, *self._owed())),
            findings=distinct(self._findings),
            operations=len(self._begins),
            ended=self._ended,
            entries=self._log,
        )

    def _perform(self, operation: Operation) -> None:
        if self._failed:
            return
        self._performed.append(operation)
        match operation:
            case Step():
                self._steps(1)
            case Advance(steps=int(steps)):
                self._steps(steps)
            case Advance():
                raise BadInput(f"a case has no virtual time to wait for, got {in_words(operation)}; expected `steps`")
            case _:
                self._call(operation)

    def _steps(self, count: int) -> None:
        """Until so many forward passes were launched, or there is no work; not every step of an asynchronous engine launches one."""
        while count > 0 and self._steps_on():
            count -= self._step()

    def _steps_on(self) -> bool:
        return not self._failed and self._stalled_steps < STALLED_STEPS and self._has_work()

    def _call(self, operation: Operation) -> None:
        op, self._ops = self._ops, self._ops + 1
        self._begins.append(len(self._log))
        if isinstance(operation, Submit) and operation.prompt.token_ids is None:
            prompt = Prompt(text=operation.prompt.text, tokens=self.backend.tokenize(operation.prompt.text or ""))
            operation = operation.model_copy(update={"prompt": prompt})
        asked, data = _as_called(operation)  # type: ignore[arg-type]  # frozen models can be hashed, which pyright cannot see
        self._decoded[id(data)] = asked
        # Written only together with what it did: an engine that crashes in a call leaves no half transaction.
        events = self._ask(f"call #{op}, {asked.verb}", self.backend.apply, op, asked)
        self._write(Called(op=op, operation=data, by="timeline"), *events)

    def _step(self) -> int:
        """Make a step; returns how many forward passes it launched."""
        self._begins.append(len(self._log))
        self._now_ns += STEP_NS
        events = self._ask("step", self.backend.step)
        self._write(*events)
        kinds = [type(event) for event in events]
        self._stalled_steps = 0 if Delivered in kinds else self._stalled_steps + 1
        self._failed = self._failed or StepFailed in kinds
        return kinds.count(Launched)

    def _has_work(self) -> bool:
        return self._ask("has_work", self.backend.has_work)

    def _ask(self, during: str, method: Callable[..., Answer], *arguments: object) -> Answer:
        """Ask the engine: what it raises is a finding, unlike what the harness may raise."""
        self.during = during
        try:
            return method(*arguments)
        except BadInput:
            raise
        except Exception:
            with crash_in(during):
                raise

    def _close(self, why: str, error: str = "") -> None:
        self._ended = why
        self._write(Closed(why=why, count=len(self._log), error=error))

    def _write(self, *events: Event) -> None:
        now_ns, first = self._now_ns, len(self._log)
        entries = [Entry(seq, now_ns, "r0", event) for seq, event in enumerate(events, first)]
        self._log += entries
        if self.explainer is not None and self.explainer.mismatch is None:
            self._explain(entries)
        if self.listener is not None:
            self.listener(entries)

    def _explain(self, entries: Sequence[Entry]) -> None:
        explainer = self.explainer
        assert explainer is not None
        explainer.feed(entries)
        if not isinstance(entries[-1].event, Closed):
            explainer.compare_state(self._ask("state", self.backend.state))
        if (mismatch := explainer.mismatch) is not None:
            self._find(CONFORMANCE, mismatch.seq, mismatch.sentence, f"expected {mismatch.expected}\ngot {mismatch.got}")

    def _find(self, id: str, seq: int, sentence: str, detail: str = "", *, expected: str = "", operations: int | None = None) -> None:
        if operations is None:
            operations = bisect_right(self._begins, seq)
        self._findings.append(Finding(id=id, operations=operations, seq=seq, sentence=sentence, expected=expected, detail=detail))

    def _asleep(self) -> bool:
        return self._ask("state", self.backend.state).sleep_level is not None

    def _refused(self) -> str | None:
        """What the last call was refused for."""
        last = self._log[-1].event
        return last.error.code if isinstance(last, Returned) and last.error is not None else None

    def _why_idle(self) -> str:
        """As the lockstep executor says it."""
        state = self._ask("state", self.backend.state)
        if state.out_of_service:
            return "out-of-service"
        if self._has_work():
            return "stalled"
        if not (state.running or state.waiting or state.blocked):
            return "drained"
        return "paused" if state.pause_mode is not None else "stalled"


def crashed(told: str) -> str:
    """What is wrong with an engine that raised something that is no answer; `told`: what, and in what."""
    return f"the engine crashed {told}"


def not_drained(ended: str, entries: Sequence[Entry]) -> str:
    """What is wrong with a run that ended so; of one in which a forward pass broke, with the reason that the engine gave."""
    broke = next((f" ({entry.event.why})" for entry in reversed(entries) if isinstance(entry.event, StepFailed)), "")
    return f"the run ended {ended}{broke}, although everything was done to bring the engine back and resume it"


def back_into_service(refused: Callable[[], str | None], *, asleep: Callable[[], bool]) -> Iterator[Operation]:
    """Operations that wake an engine, end any weight session, repair any failed update and resume, as its answers demand.

    Args:
        refused: what the last call was refused for, None if it was not.
        asleep: whether the engine may be asleep.
    """
    if asleep():
        yield WakeUp()
    yield Resume()
    if refused() == "conflict":
        yield FinishWeightUpdate()
        if refused() is not None:
            yield from _fail_session(refused)
        yield Resume()
    if refused() == "out-of-service":
        yield Pause(mode="keep", clear_cache=True)
        yield Step()  # An engine that steps asynchronously has one in flight: only when that has landed is the pause effective.
        yield SwapWeights(source=_ORIGINAL, version="v0")
        yield Resume()


def _fail_session(refused: Callable[[], str | None]) -> Iterator[Operation]:
    """A session ends by a part that fails; the part must be `of` as many as the session's earlier ones."""
    for of in range(1, MOST_PARTS + 1):
        yield UpdateWeights(source=_ORIGINAL, of=of, fails=True)
        if refused() != "invalid":
            return


@lru_cache(maxsize=8192)
def _as_called(operation: Operation) -> tuple[Operation, dict[str, Any]]:
    """The operation with its prompt as token ids, as the executor hands it in, and its data. Equal ones share both."""
    if isinstance(operation, Submit) and (tokens := operation.prompt.token_ids) is not None:
        operation = operation.model_copy(update={"prompt": Prompt(text=operation.prompt.text, tokens=tokens)})
    return operation, to_data(operation)


_ORIGINAL = WeightSource(original=True)


def submitted(operations: Sequence[Operation]) -> set[str]:
    """The ids that any of the operations submits."""
    return {operation.id for operation in operations if isinstance(operation, Submit)}
