"""A case on a live engine: the same operations in real time, judged from its logs when they are over.

Where `step` stands, the driver lets the engine make one; what comes between two of them reaches the core as close together as
clients can bring it, and it is the core's log that says in which order it was taken up. So a case says less than in lockstep what
happens, and a failure may need several runs to show again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from harness.backends import LiveBackend
from harness.events import Answered, Asked, Entry, Launched
from harness.execute import Listener
from harness.fuzz.case import API_TRUTH, CONFORMANCE, ENDS, Case, Finding, Outcome, back_into_service, crashed, distinct, not_drained
from harness.operations import DRIVER_VERBS, Operation
from harness.trial import Trial, run_live_trial


def run_live_case(case: Case, backend: LiveBackend, *, drain: bool = True, listener: Listener | None = None) -> Outcome:
    """Put a live engine to a case, from its start to its end; arguments as for `run_case`.

    Raises:
        BackendError: the engine cannot be started, or asked for what the case asks for.
    """
    heard: list[Entry] = []
    recovery = _Recovery(heard) if drain else None

    def hear(entries: Sequence[Entry]) -> None:
        heard.extend(entries)
        if listener is not None:
            listener(entries)

    async def run(folder: Path) -> Trial:
        try:
            return await run_live_trial(case.scenario("live case"), backend, folder, progress=hear, afterwards=recovery or ())
        finally:
            await backend.stop()

    with TemporaryDirectory() as folder:
        trial = asyncio.run(run(Path(folder)))
    performed = replace(case, operations=(*case.operations, *(recovery.performed if recovery is not None else ())))
    return _outcome(performed, trial, drained=drain)


class _Recovery:
    """What brings the engine back into service, as its answers demand; `performed` is what was asked for."""

    def __init__(self, heard: Sequence[Entry]) -> None:
        self.performed: list[Operation] = []
        self._heard = heard

    def __iter__(self) -> Iterator[Operation]:
        for operation in back_into_service(self._refused, asleep=lambda: True):
            if not isinstance(operation, DRIVER_VERBS):  # the engine makes its steps by itself
                self.performed.append(operation)
                yield operation

    def _refused(self) -> str | None:
        answers = (entry.event for entry in reversed(self._heard) if isinstance(entry.event, Answered))
        last = next(answers, None)
        return last.error.code if last is not None and last.error is not None else None


def _outcome(case: Case, trial: Trial, *, drained: bool) -> Outcome:
    begins = [entry.seq for entry in trial.entries if isinstance(entry.event, Asked | Launched)]
    closed = trial.closed
    ended = closed.why if closed is not None else "crashed"
    findings = [
        Finding(id=id, operations=sum(begin <= seq for begin in begins), seq=seq, sentence=sentence, expected=expected, detail=detail)
        for id, seq, sentence, expected, detail in _found(trial, ended, drained=drained)
    ]
    return Outcome(case=case, findings=distinct(findings), operations=len(begins), ended=ended, entries=trial.entries)


def _found(trial: Trial, ended: str, *, drained: bool) -> Iterator[tuple[str, int, str, str, str]]:
    """All that is wrong: id, event, sentence, what was promised instead, and detail."""
    last, closed = trial.entries[-1].seq, trial.closed
    for judgement in trial.verdict.judgements:
        for one in judgement.violations:
            yield judgement.invariant, one.seq, one.sentence, one.expected, ""
    explanation = trial.verdict.explanation
    if explanation is not None and (mismatch := explanation.mismatch) is not None:
        yield CONFORMANCE, mismatch.seq, mismatch.sentence, "", f"expected {mismatch.expected}\ngot {mismatch.got}"
    if ended == "crashed":
        yield API_TRUTH, last, crashed(closed.error if closed is not None else "and nothing says how the run ended"), "", ""
    elif drained and ended != "drained":
        yield ENDS, last, not_drained(ended, trial.entries), "", ""
