"""A trial: one scenario on one engine, executed, recorded, judged, explained.

The verdict is a function of the log and the scenario, so a stored log can be
judged again by a newer checker: `run_trial` computes it while the run goes on,
`review` from a log on disk.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from harness.backends import Backend, CannotRun, EngineInfo, Limited, LiveBackend, Prepares, Recomputes, opened_event
from harness.client import ClientView
from harness.conformance import Explainer, Explanation, together
from harness.coverage import ClientSituations, Coverage, Situations, merged
from harness.errors import BadInput
from harness.events import Closed, Differed, Entry, Event, Heard, Launched, Opened, StepFailed
from harness.execute import Listener, Lockstep
from harness.invariants import Judge
from harness.invariants.panel import CLIENT, Panel
from harness.live import Live, Rank
from harness.log import Log, LogWriter, read_log
from harness.operations import DRIVER_VERBS, Operation, Submit
from harness.replay import BLOCKS_SEEN, Replay
from harness.scenario import Scenario
from harness.verdict import Judgement

Status = Literal["holds", "violated", "unknown"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What one run showed."""

    status: Status
    reasons: tuple[str, ...]
    """Why it is not `holds`, a sentence each."""
    judgements: tuple[Judgement, ...]
    explanation: Explanation | None
    """None if the model was not asked."""
    missed: tuple[str, ...] = ()
    """Those of the reasons that say what did not come about."""

    @property
    def missed_its_point(self) -> bool:
        """All is well but for what did not come about: of a live engine, where a clock decides, another run may show it."""
        return self.status == "unknown" and self.reasons == self.missed


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """A run and its verdict: what a report is made of."""

    scenario: Scenario | None
    entries: Sequence[Entry]
    replay: Replay
    """The state at the end of the log; of several ranks that of the first, and of a log that clients alone kept, nothing."""
    verdict: Verdict
    coverage: Coverage
    """The situations that it reached."""
    view: ClientView | None = None
    """What clients knew at the end, if they kept a log."""
    attempts: int = 1
    """How many runs it took, of which this is the last: a live engine may miss what a scenario is about."""

    @property
    def opened(self) -> Opened:
        """Who ran what; of several writers the one that shows most, about the scenario that any of them names."""
        return _opened(self.entries)

    @property
    def closed(self) -> Closed | None:
        """How it ended, of a live run as its clients say; None if it has no end."""
        return _closed(self.entries)

    @property
    def from_outside(self) -> bool:
        """Clients alone kept a log."""
        return self.view is not None and not self.view.ranks

    @property
    def interrupted(self) -> bool:
        """The user stopped it."""
        return self.closed is not None and self.closed.why == "interrupted"


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
    judge = Judge()
    situations = _counted(judge)
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


def check_possible(scenario: Scenario, backend: Backend | LiveBackend, info: EngineInfo) -> None:
    """What only a started engine knows: the model is given no vocabulary, so it would accept what the engine must refuse.

    Raises:
        BadInput: a prompt has a token id that the engine has no embedding for.
        CannotRun: the engine cannot be asked for something that the scenario asks for.
    """
    for entry in scenario.timeline:
        driven = isinstance(entry.operation, DRIVER_VERBS)
        if isinstance(backend, Limited) and not driven and (why := backend.cannot(entry.operation)) is not None:
            raise CannotRun(f"{scenario.path or scenario.name}:{entry.line}: {backend.name} cannot {why}")
        if info.vocab_size is None or not isinstance(entry.operation, Submit):
            continue
        highest = max(entry.operation.prompt.token_ids or (0,))
        if highest >= info.vocab_size:
            id = entry.operation.id
            raise BadInput(f"{scenario.path}:{entry.line}: {id} has token {highest}; expected token ids below {info.vocab_size}")


def _differed(explainer: Explainer | None) -> tuple[Differed, ...]:
    return () if explainer is None or explainer.differed is None else (explainer.differed,)


async def run_live_trial(
    scenario: Scenario,
    backend: LiveBackend,
    folder: Path,
    *,
    seed: int = 0,
    min_pass_rate: float = 1.0,
    progress: Listener = lambda entries: None,
    afterwards: Iterable[Operation] = (),
) -> Trial:
    """Start a live engine and run a scenario on it; the logs of its clients and ranks are in `folder` when this returns.

    The engine is left running, with nothing paused and no request of ours: whoever made the backend stops it.

    Args:
        seed, min_pass_rate, progress: as for `run_trial`; `progress` hears what clients do.
        afterwards: operations that follow the timeline, each as soon as the engine has come to rest after the one before.

    Raises:
        CannotRun: the engine cannot be asked for something that the scenario asks for.
        BackendError: the engine cannot be started.
        LogError: a log cannot be written.
    """
    info = await backend.start(scenario.engine, folder)
    check_possible(scenario, backend, info)
    _prepare(scenario, backend)
    base_ns = time.monotonic_ns()
    opened = opened_event(scenario.engine, backend, info, digest=scenario.digest, seed=seed, clock_base_ns=base_ns)
    with ExitStack() as files:
        writer = files.enter_context(LogWriter(folder, CLIENT))
        ranks = [files.enter_context(closing(Rank(path))) for path in sorted(folder.glob("events.r*.jsonl"))]
        listeners: list[Listener] = [lambda news: _append(writer, news), progress]
        recompute = (lambda: backend.references(_of_ranks(folder))) if isinstance(backend, Recomputes) else tuple
        driver = Live(scenario, backend, listeners, ranks=ranks, base_ns=base_ns, afterwards=afterwards, recompute=recompute)
        await driver.run(msgspec.structs.replace(opened, level=0))
    return review(read_log(folder), scenario, min_pass_rate=min_pass_rate)


def _prepare(scenario: Scenario, backend: LiveBackend) -> None:
    for entry in scenario.timeline:
        if isinstance(backend, Prepares) and not isinstance(entry.operation, DRIVER_VERBS):
            backend.prepare(entry.operation)


def review(log: Log, scenario: Scenario | None, *, whole: bool = True, min_pass_rate: float = 1.0) -> Trial:
    """Judge a stored log, and have the model explain it if it shows blocks.

    Args:
        whole: False for a log that was cut on purpose: it is not held against it that it has no end.
        min_pass_rate: as for `run_trial`.
    """
    panel = Panel(log.entries)
    situations: list[Situations | ClientSituations] = [_counted(judge) for judge in panel.ranks.values()]
    if panel.client is not None:
        in_front = ClientSituations(panel.client.replay)
        panel.client.add_watcher(in_front)
        situations.append(in_front)
    judgements = panel.finish()
    explanation = _explain(panel, cut=not whole)
    coverage = merged(counted.coverage for counted in situations)
    verdict = assess(
        scenario if whole else None,
        log.entries,
        judgements,
        explanation,
        coverage,
        whole=whole,
        torn=map(str, log.tails),
        min_pass_rate=min_pass_rate,
    )
    replay = next((judge.replay for judge in panel.ranks.values()), Replay())
    view = panel.client.replay if panel.client is not None else None
    return Trial(scenario=scenario, entries=log.entries, replay=replay, verdict=verdict, coverage=coverage, view=view)


def _explain(panel: Panel, *, cut: bool) -> Explanation | None:
    """What the model says of each rank that shows blocks, together; None if none does."""
    explanations = []
    for writer, entries in panel.by_rank.items():
        if (panel.ranks[writer].replay.level or 0) < BLOCKS_SEEN:
            continue
        explainer = Explainer(cut=cut)
        try:
            explainer.feed(entries)
        except ValueError as error:
            raise BadInput(f"this log is not one that the model can follow: {error}") from error
        explanations.append(explainer.explanation)
    return together(explanations) if explanations else None


def _counted(judge: Judge) -> Situations:
    """What counts situations beside a judge."""
    situations = Situations(judge.replay)
    judge.add_watcher(situations)
    return situations


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
    closed = _closed(entries)
    missed = _missed(scenario, closed, coverage)
    unknown = [*torn, *_unknowns(scenario, entries, judgements, whole=whole), *missed]
    if closed is not None and closed.why == "crashed":
        violated.append(f"the engine crashed {closed.error}")
    elif closed is not None and closed.why == "failed":
        failures = [entry.event for entry in entries if isinstance(entry.event, StepFailed)]
        violated += [f"step {failure.step} failed, {failure.why}" for failure in failures]
    elif scenario is not None and closed is not None and closed.why not in ("interrupted", scenario.expect.ends):
        violated.append(f"the run ended {closed.why}, expected {scenario.expect.ends}")
    status: Status = "violated" if violated else "unknown" if unknown else "holds"
    reasons = (*violated, *unknown)
    return Verdict(status=status, reasons=reasons, judgements=judgements, explanation=explanation, missed=tuple(missed))


def _unexpected_violations(scenario: Scenario | None, judgements: Sequence[Judgement]) -> list[str]:
    found = _violated(judgements)
    expected = list(scenario.expect.violates) if scenario is not None and scenario.fault is None else []
    sentences = [f"{name} is violated" for name in found if name not in expected]
    return sentences + [f"{name} was expected to be violated and is not" for name in expected if name not in found]


def _violated(judgements: Iterable[Judgement]) -> list[str]:
    return [judgement.invariant for judgement in judgements if judgement.status == "violated"]


def _unknowns(scenario: Scenario | None, entries: Sequence[Entry], judgements: Sequence[Judgement], *, whole: bool) -> list[str]:
    opened = _opened(entries)
    sentences = []
    if all(judgement.status == "not-checkable" for judgement in judgements):
        sentences.append("no invariant could be checked on this log")
    closed = _closed(entries)
    unclosed = sorted({entry.writer for entry in entries} - {entry.writer for entry in entries if isinstance(entry.event, Closed)})
    if unclosed and whole:
        sentences += [f"the log{of} is not closed: it ends where its writer was stopped" for of in _of_writers(unclosed, entries)]
    elif closed is not None and closed.why == "interrupted":
        sentences.append("the run was interrupted")
    if whole and not any(isinstance(entry.event, Launched | Heard) for entry in entries):
        sentences.append("no step was made, so nothing was shown")
    if scenario is not None and opened.level < scenario.needs.level:
        sentences.append(f"the scenario needs level {scenario.needs.level}, {opened.backend} shows level {opened.level}")
    return sentences


def _missed(scenario: Scenario | None, closed: Closed | None, coverage: Coverage) -> list[str]:
    """Entries whose moment never came, and situations that the scenario is there for."""
    unfired = closed.unfired if closed is not None and not closed.cut_short else ()
    reaches = scenario.expect.reaches if scenario is not None else ()
    sentences = [f"never fired, {entry}" for entry in unfired]
    return sentences + [f"{name} was to be reached and was not" for name in reaches if name not in coverage]


def _of_writers(writers: Sequence[str], entries: Sequence[Entry]) -> list[str]:
    """Whose log, where there are several."""
    several = any(entry.writer != entries[0].writer for entry in entries)
    return [f" of {writer}" if several else "" for writer in writers]


def _opened(entries: Sequence[Entry]) -> Opened:
    found = [entry.event for entry in entries if isinstance(entry.event, Opened)]
    most = max(found, key=lambda opened: opened.level)
    of_scenario = next((opened for opened in found if opened.scenario), most)
    return msgspec.structs.replace(most, scenario=of_scenario.scenario, seed=of_scenario.seed)


def _closed(entries: Sequence[Entry]) -> Closed | None:
    """How the run ended: as its clients say, if they kept a log."""
    found = {entry.writer: entry.event for entry in entries if isinstance(entry.event, Closed)}
    if any(entry.writer == CLIENT for entry in entries):
        return found.get(CLIENT)
    return next(iter(found.values()), None)


def _of_ranks(folder: Path) -> list[Entry]:
    return [entry for entry in read_log(folder).entries if entry.writer != CLIENT]


def _append(writer: LogWriter, entries: Sequence[Entry]) -> None:
    writer.append(entries[0].t_ns, [entry.event for entry in entries])


EXIT_CODES: dict[Status, int] = {"holds": 0, "violated": 1, "unknown": 2}


def worst(statuses: Iterable[Status]) -> Status:
    """Of several files, violated counts before unknown before holds."""
    found = set(statuses)
    order: tuple[Status, ...] = ("violated", "unknown", "holds")
    return next(status for status in order if status in found)
