"""A trial: one scenario on one engine, executed, recorded, judged, explained.

The verdict is a function of the log and the scenario, so a stored log can be
judged again by a newer checker: `run_trial` computes it while the run goes on,
`review` from a log on disk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from harness.backends import Backend, EngineInfo
from harness.conformance import Explainer, Explanation
from harness.events import SCHEMA, Closed, Entry, Opened
from harness.execute import Listener, Lockstep
from harness.invariants import Judge
from harness.log import Log, LogWriter
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

    @property
    def opened(self) -> Opened:
        opened = self.entries[0].event
        assert isinstance(opened, Opened)
        return opened


def run_trial(
    scenario: Scenario,
    backend: Backend,
    info: EngineInfo,
    folder: Path,
    *,
    seed: int = 0,
    explain: bool = False,
    progress: Listener = lambda entries: None,
) -> Trial:
    """Run a scenario on a started engine; the log is in `folder` when this returns, also after Ctrl-C.

    Args:
        info: what the engine said when it started.
        explain: have the model explain every transaction, and compare the whole visible state after each.
        progress: hears each transaction after it was recorded.

    Raises:
        LogError: the log cannot be written.
    """
    entries: list[Entry] = []
    judge = Judge()
    explainer = Explainer() if explain else None
    with LogWriter(folder) as writer:
        listeners: list[Listener] = [lambda news: _append(writer, news), entries.extend, judge.feed]
        if explainer is not None:
            listeners += [explainer.feed, lambda _: explainer.compare_state(backend.state())]
        lockstep = Lockstep(scenario, backend, [*listeners, progress])
        lockstep.run(opened_event(scenario.engine, backend, info, digest=scenario.digest, seed=seed))
    verdict = assess(scenario, entries, judge.finish(), explainer.explanation if explainer else None)
    return Trial(scenario=scenario, entries=entries, replay=judge.replay, verdict=verdict)


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


def review(log: Log, scenario: Scenario | None, *, whole: bool = True) -> Trial:
    """Judge a stored log, and have the model explain it if it shows blocks.

    Args:
        whole: False for a log that was cut on purpose: it is not held against it that it has no end.
    """
    judge = Judge()
    judge.feed(log.entries)
    explainer = Explainer()
    if log.opened.level >= 2:
        explainer.feed(log.entries)
    explanation = explainer.explanation if log.opened.level >= 2 else None
    verdict = assess(scenario if whole else None, log.entries, judge.finish(), explanation, whole=whole, torn=map(str, log.tails))
    return Trial(scenario=scenario, entries=log.entries, replay=judge.replay, verdict=verdict)


def assess(
    scenario: Scenario | None,
    entries: Sequence[Entry],
    judgements: Iterable[Judgement],
    explanation: Explanation | None,
    *,
    whole: bool = True,
    torn: Iterable[str] = (),
) -> Verdict:
    """Weigh what was found against what the scenario expects: violated counts before unknown before holds."""
    judgements = tuple(judgements)
    violated = _unexpected_violations(scenario, judgements)
    if explanation is not None and explanation.mismatch is not None:
        violated.append(f"the model does not explain event {explanation.mismatch.seq}")
    unknown = [*torn, *_unknowns(scenario, entries, judgements, whole=whole)]
    closed = _closed(entries)
    if scenario is not None and closed is not None and closed.why not in ("interrupted", scenario.expect.ends):
        violated.append(f"the run ended {closed.why}, expected {scenario.expect.ends}")
    status: Status = "violated" if violated else "unknown" if unknown else "holds"
    return Verdict(status=status, reasons=(*violated, *unknown), judgements=judgements, explanation=explanation)


def _unexpected_violations(scenario: Scenario | None, judgements: Sequence[Judgement]) -> list[str]:
    found = [judgement.invariant for judgement in judgements if judgement.status == "violated"]
    expected = list(scenario.expect.violates) if scenario is not None else []
    sentences = [f"{name} is violated" for name in found if name not in expected]
    return sentences + [f"{name} was expected to be violated and is not" for name in expected if name not in found]


def _unknowns(scenario: Scenario | None, entries: Sequence[Entry], judgements: Sequence[Judgement], *, whole: bool) -> list[str]:
    opened = entries[0].event
    sentences = []
    if all(judgement.status == "not-checkable" for judgement in judgements):
        sentences.append("no invariant could be checked on this log")
    closed = _closed(entries)
    if closed is None and whole:
        sentences.append("the log is not closed: it ends where its writer was stopped")
    elif closed is not None and closed.why == "interrupted":
        sentences.append("the run was interrupted")
    elif closed is not None:
        sentences += [f"never fired, {entry}" for entry in closed.unfired]
    if scenario is None:
        return sentences
    if isinstance(opened, Opened) and opened.level < scenario.needs.level:
        sentences.append(f"the scenario needs level {scenario.needs.level}, {opened.backend} shows level {opened.level}")
    sentences += [f"situation {name} is not known to this version" for name in scenario.expect.reaches]
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
