"""A trial: one scenario on one engine, executed, recorded, judged, explained.

The verdict is a function of the log and the scenario, so a stored log can be
judged again by a newer checker: `run_trial` computes it while the run goes on,
`review` from a log on disk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from harness.backends import Backend, EngineInfo, Recomputes
from harness.conformance import Explainer, Explanation
from harness.coverage import Coverage, Situations
from harness.errors import BadInput
from harness.events import SCHEMA, Closed, Differed, Entry, Event, Launched, Opened, StepFailed
from harness.execute import Listener, Lockstep
from harness.invariants import Judge
from harness.log import Log, LogWriter
from harness.operations import Submit
from harness.replay import Replay
from harness.scenario import EngineShape, Scenario
from harness.verdict import Judgement
from harness.version import version

Status = Literal["holds", "violated", "unknown"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one run showed."""

    status: Status
    reasons: tuple[str, ...]
    """Why it is not `holds`, a sentence each."""
    judgements: tuple[Judgement, ...]
    explanation: Explanation | None
    """None if the model was not asked."""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A run and its verdict: what a report is made of."""

    scenario: Scenario | None
    entries: Sequence[Entry]
    replay: Replay
    """The state at the end of the log."""
    verdict: Verdict
    coverage: Coverage
    """The situations that it reached."""

    @property
    def opened(self) -> Opened:
        opened = self.entries[0].event
        assert isinstance(opened, Opened)
        return opened

    @property
    def interrupted(self) -> bool:
        """The user stopped it."""
        closed = _closed(self.entries)
        return closed is not None and closed.why == "interrupted"


class Driver(Protocol):
    """What carries a scenario out, from `opened` to `closed`."""

    def run(self, opened: Event) -> None: ...


def run_trial(
    scenario: Scenario,
    backend: Backend,
    info: EngineInfo,
    folder: Path,
    *,
    seed: int = 0,
    explain: bool = False,
    min_pass_rate: float = 1.0,
    progress: Listener = lambda entries: None,
    drive: Callable[[Sequence[Listener]], Driver] | None = None,
) -> Trial:
    """Run a scenario on a started engine; the log is in `folder` when this returns, also after Ctrl-C.

    Args:
        info: what the engine said when it started.
        explain: have the model explain every transaction, and compare the whole visible state after each.
        min_pass_rate: the share of golden checks that must pass; less than 1 is for platforms that are not batch-invariant.
        progress: hears each transaction after it was recorded.
        drive: makes the driver, given who is to hear it; by default lockstep with `backend`.

    Raises:
        LogError: the log cannot be written.
    """
    entries: list[Entry] = []
    judge, situations = _judge()
    explainer = Explainer() if explain else None
    with LogWriter(folder) as writer:
        listeners: list[Listener] = [lambda news: _append(writer, news), entries.extend, judge.feed]
        if explainer is not None:
            listeners += [explainer.feed, lambda _: explainer.compare_state(backend.state())]
        recompute = (lambda: backend.references(entries)) if isinstance(backend, Recomputes) else tuple
        listeners.append(progress)
        if drive is not None:
            driver = drive(listeners)
        else:
            driver = Lockstep(scenario, backend, listeners, recompute=recompute, differed=lambda: _differed(explainer))
        driver.run(opened_event(scenario.engine, backend, info, digest=scenario.digest, seed=seed))
    explanation = explainer.explanation if explainer else None
    coverage = situations.coverage
    verdict = assess(scenario, entries, judge.finish(), explanation, coverage, min_pass_rate=min_pass_rate)
    return Trial(scenario=scenario, entries=entries, replay=judge.replay, verdict=verdict, coverage=coverage)


def check_possible(scenario: Scenario, info: EngineInfo) -> None:
    """What only a started engine knows: the model is given no vocabulary, so it would accept what the engine must refuse.

    Raises:
        BadInput: a prompt has a token id that the engine has no embedding for.
    """
    for entry in scenario.timeline:
        if info.vocab_size is None or not isinstance(entry.operation, Submit):
            continue
        highest = max(entry.operation.prompt.token_ids or (0,))
        if highest >= info.vocab_size:
            id = entry.operation.id
            raise BadInput(f"{scenario.path}:{entry.line}: {id} has token {highest}; expected token ids below {info.vocab_size}")


def _differed(explainer: Explainer | None) -> tuple[Differed, ...]:
    return () if explainer is None or explainer.differed is None else (explainer.differed,)


def opened_event(shape: EngineShape, backend: Backend, info: EngineInfo, *, digest: str, seed: int) -> Opened:
    """The first event of a lockstep log."""
    return Opened(
        schema=SCHEMA,
        caesura=version(),
        backend=backend.name,
        versions=info.versions,
        level=backend.level,
        device=info.device,
        engine=shape.model_dump(mode="json"),
        profile=info.profile,
        eos_token_ids=info.eos_token_ids,
        scenario=digest,
        seed=seed,
        clock_base_ns=0,
        rank=0,
    )


def review(log: Log, scenario: Scenario | None, *, whole: bool = True, min_pass_rate: float = 1.0) -> Trial:
    """Judge a stored log, and have the model explain it if it shows blocks.

    Args:
        whole: False for a log that was cut on purpose: it is not held against it that it has no end.
        min_pass_rate: as for `run_trial`.
    """
    judge, situations = _judge()
    judge.feed(log.entries)
    explanation = _explain(log, cut=not whole) if log.opened.level >= 2 else None
    coverage = situations.coverage
    verdict = assess(
        scenario if whole else None,
        log.entries,
        judge.finish(),
        explanation,
        coverage,
        whole=whole,
        torn=map(str, log.tails),
        min_pass_rate=min_pass_rate,
    )
    return Trial(scenario=scenario, entries=log.entries, replay=judge.replay, verdict=verdict, coverage=coverage)


def _explain(log: Log, *, cut: bool) -> Explanation:
    explainer = Explainer(cut=cut)
    try:
        explainer.feed(log.entries)
    except ValueError as error:
        raise BadInput(f"this log is not one that the model can follow: {error}") from error
    return explainer.explanation


def _judge() -> tuple[Judge, Situations]:
    """A judge of every invariant, and what counts situations beside it."""
    judge = Judge()
    situations = Situations(judge.replay)
    judge.add_watcher(situations)
    return judge, situations


def assess(
    scenario: Scenario | None,
    entries: Sequence[Entry],
    judgements: Iterable[Judgement],
    explanation: Explanation | None,
    coverage: Coverage,
    *,
    whole: bool = True,
    torn: Iterable[str] = (),
    min_pass_rate: float = 1.0,
) -> Verdict:
    """Weigh what was found against what the scenario expects: violated counts before unknown before holds."""
    judgements = tuple(judgement.tolerating(min_pass_rate) for judgement in judgements)
    violated = _unexpected_violations(scenario, judgements)
    if explanation is not None and explanation.mismatch is not None:
        violated.append(f"the model does not explain event {explanation.mismatch.seq}")
    unknown = [*torn, *_unknowns(scenario, entries, judgements, coverage, whole=whole)]
    closed = _closed(entries)
    if closed is not None and closed.why == "crashed":
        violated.append(f"the engine crashed {closed.error}")
    elif closed is not None and closed.why == "failed":
        failures = [entry.event for entry in entries if isinstance(entry.event, StepFailed)]
        violated += [f"step {failure.step} failed, {failure.why}" for failure in failures]
    elif scenario is not None and closed is not None and closed.why not in ("interrupted", scenario.expect.ends):
        violated.append(f"the run ended {closed.why}, expected {scenario.expect.ends}")
    status: Status = "violated" if violated else "unknown" if unknown else "holds"
    return Verdict(status=status, reasons=(*violated, *unknown), judgements=judgements, explanation=explanation)


def _unexpected_violations(scenario: Scenario | None, judgements: Sequence[Judgement]) -> list[str]:
    found = _violated(judgements)
    expected = list(scenario.expect.violates) if scenario is not None and scenario.fault is None else []
    sentences = [f"{name} is violated" for name in found if name not in expected]
    return sentences + [f"{name} was expected to be violated and is not" for name in expected if name not in found]


def _violated(judgements: Iterable[Judgement]) -> list[str]:
    return [judgement.invariant for judgement in judgements if judgement.status == "violated"]


def _unknowns(
    scenario: Scenario | None, entries: Sequence[Entry], judgements: Sequence[Judgement], coverage: Coverage, *, whole: bool
) -> list[str]:
    opened = entries[0].event
    sentences = []
    if all(judgement.status == "not-checkable" for judgement in judgements):
        sentences.append("no invariant could be checked on this log")
    closed = _closed(entries)
    if closed is None and whole:
        sentences.append("the log is not closed: it ends where its writer was stopped")
    elif closed is not None and closed.why == "interrupted":
        sentences.append("the run was interrupted")
    elif closed is not None and not closed.cut_short:
        sentences += [f"never fired, {entry}" for entry in closed.unfired]
    if whole and not any(isinstance(entry.event, Launched) for entry in entries):
        sentences.append("no step was made, so nothing was shown")
    if scenario is None:
        return sentences
    if isinstance(opened, Opened) and opened.level < scenario.needs.level:
        sentences.append(f"the scenario needs level {scenario.needs.level}, {opened.backend} shows level {opened.level}")
    sentences += [f"{name} was to be reached and was not" for name in scenario.expect.reaches if name not in coverage]
    return sentences


def _closed(entries: Sequence[Entry]) -> Closed | None:
    last = entries[-1].event
    return last if isinstance(last, Closed) else None


def _append(writer: LogWriter, entries: Sequence[Entry]) -> None:
    writer.append(entries[0].t_ns, [entry.event for entry in entries])


EXIT_CODES: dict[Status, int] = {"holds": 0, "violated": 1, "unknown": 2}


def worst(statuses: Iterable[Status]) -> Status:
    """Of several files, violated counts before unknown before holds."""
    found = set(statuses)
    order: tuple[Status, ...] = ("violated", "unknown", "holds")
    return next(status for status in order if status in found)
