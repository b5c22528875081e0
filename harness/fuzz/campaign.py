"""Looks for failures on several processes, and merges what they find.

Seeds are handed out in slices of half a second. A worker that is killed loses its slice, which is handed out again; one
that dies twice in the same case, or does not come back from it, has found something. Everything done is in the ledger of
the run folder, so that a campaign goes on where it was stopped. Scenario files are run first: nothing is new before it
is known what they show.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import BadInput
from harness.fuzz.case import API_TRUTH, Case, Finding, Signature
from harness.fuzz.hunt import Failed, Tally, primary
from harness.fuzz.known import Known
from harness.fuzz.ledger import Ledger, Plan, read_ledger
from harness.fuzz.team import Died, Hung, Team, Unplaced, Worker
from harness.fuzz.worker import Grown, Hunt, Hunted, Recall, Recalled, Refusal, Shrink, Shrunk, Task

SLICE_CASES = 1024
"""The most cases in a slice."""
STILLBORN = 3
"""So many deaths before any case was done, and it is the engine's start that fails: the campaign ends."""
LISTEN_S = 0.2
"""How often the time and the keyboard are looked at."""
CLOSING_S = 60.0
"""Once the time is up or Ctrl-C was pressed, how long shrinking may still take; what is not shrunk then is kept as it is."""


class CampaignError(BadInput):
    """The campaign cannot go on."""


@dataclass(kw_only=True)
class Failure:
    """One way to fail: every case that fails like that counts here."""

    signature: Signature
    first: Failed
    """The first case."""
    count: int = 0
    known: str | None = None
    """Where it is written down as known; None: it is new."""
    minimal: Case | None = None
    """The smallest case that shows it; None: not shrunk."""
    ended: str = "drained"
    finding: Finding | None = None
    """What the minimal case shows."""

    @property
    def shown(self) -> Finding:
        """What the first case showed."""
        return next(finding for finding in self.first.findings if Signature.of(finding) == self.signature)


@dataclass(kw_only=True)
class Result:
    """What a campaign found."""

    tally: Tally
    failures: list[Failure]
    seconds: float
    """By the clock, since this call began."""
    interrupted: bool
    deaths: int = 0
    """Workers that died and were replaced."""
    leaks: list[int] = field(default_factory=list)
    """Megabytes by which each worker had grown that was replaced for it."""
    unplaced: int = 0
    """Workers for whom there was no room."""
    failing: int = 0
    """Cases that failed, each once however much it shows."""
    uncounted: int = 0
    """Those of them that no failure counts: what is known was not recalled when the campaign ended."""
    not_recalled: dict[str, str] = field(default_factory=dict)
    """Scenario files of which it is not known what they show, and why."""

    @property
    def new(self) -> list[Failure]:
        return [failure for failure in self.failures if failure.known is None]


class Campaign:
    """A plan, carried out in a folder.

    Args:
        plan: what to do; seeds that the folder's ledger has as done are not run again.
        team: where workers come from.
        jobs: how many of them.
        seconds: stop after this time; None: when the plan's cases are done.
        known: failures that are counted and not reported.
        files: scenarios; what they show on this engine is known, too, and named after the last that shows it.
        progress: called several times a second with the sum so far and the number of ways to fail.
    """

    def __init__(
        self,
        plan: Plan,
        folder: Path,
        *,
        team: Team[Any],
        jobs: int = 1,
        seconds: float | None = None,
        known: Sequence[Known] = (),
        files: Sequence[Path] = (),
        progress: Callable[[Tally, int], object] = lambda tally, ways: None,
    ) -> None:
        self.plan = plan
        self._folder = folder
        self._team = team
        self._jobs = jobs
        self._seconds = seconds
        self._known = {one.signature: one.source for one in known}
        self._files = tuple(map(str, files))
        self._shown: dict[str, Sequence[Known]] = {}
        """What each file shows, of those of which that is known or will not be."""
        self._untouched: deque[Task] = deque(map(Recall, self._files))
        """What comes before all else: the recalls, and what a worker left undone that took no more."""
        self._not_recalled: dict[str, str] = {}
        self._lost: set[str] = set()
        """Files that a worker was lost at, once."""
        self._progress = progress
        self._tally = Tally()
        self._failures: dict[Signature, Failure] = {}
        self._uncounted: deque[Failed] = deque()
        self._to_shrink: deque[Failure] = deque()
        self._again: deque[range] = deque()
        self._next = plan.seed
        self._done: set[int] = set()
        self._deaths_at: Counter[int] = Counter()
        self._deaths = 0
        self._begun = False
        """Some worker has done something."""
        self._leaks: list[int] = []
        self._unplaced = 0
        self._failing = 0
        self._workers: list[Worker] = []

    def run(self) -> Result:
        """Run until the cases are done or the time is up. Ctrl-C ends it early and loses nothing.

        Raises:
            BackendError, CampaignError: the engine cannot be started.
        """
        began = time.monotonic()
        self._take_up()
        self._ledger = Ledger(self._folder, self.plan)
        interrupted = False
        try:
            self._work(until=None if self._seconds is None else began + self._seconds)
        except KeyboardInterrupt:
            interrupted = True
            self._finish_under_way()
        finally:
            for worker in self._workers:
                worker.end()
            self._team.close()
            self._ledger.close()
        return Result(
            tally=self._tally,
            failures=self._merged(),
            seconds=time.monotonic() - began,
            interrupted=interrupted,
            deaths=self._deaths,
            leaks=self._leaks,
            unplaced=self._unplaced,
            failing=self._failing,
            uncounted=len(self._uncounted),
            not_recalled={**self._not_recalled, **dict.fromkeys(self._recalling, "the campaign ended before")},
        )

    # What is to be done.

    def _take_up(self) -> None:
        """Take up what the folder's ledger says was done."""
        try:
            past = read_ledger(self._folder)
        except BadInput:
            return
        self._tally, self._done = past.tally, past.done
        self._count(past.failed)

    def _work(self, until: float | None) -> None:
        deadline = None
        while True:
            closing = until is not None and time.monotonic() >= until
            if closing and deadline is None:
                deadline = time.monotonic() + CLOSING_S
            if deadline is not None and time.monotonic() >= deadline:
                return
            self._employ(hunting=not closing)
            if not any(worker.task for worker in self._workers):
                return
            self._listen()
            self._progress(self._tally, len(self._failures))

    def _employ(self, *, hunting: bool) -> None:
        """Give everyone without work some, and hire while there is more work than workers."""
        while True:
            idle = next((worker for worker in self._workers if worker.task is None), None)
            if idle is None and len(self._workers) >= self._jobs:
                return
            task = self._task(hunting=hunting)
            if task is None:
                return
            if idle is None:
                idle = self._team.hire()
                self._workers.append(idle)
            idle.give(task)

    def _task(self, *, hunting: bool) -> Task | None:
        if self._untouched:
            return self._untouched.popleft()
        if self._to_shrink:
            failure = self._to_shrink.popleft()
            return Shrink(failure.first.seed, failure.signature, frozenset(self._known))
        return self._slice() if hunting else None

    def _slice(self) -> Hunt | None:
        if self._again:
            again = self._again.popleft()
            return Hunt(again.start, len(again))
        while self._next in self._done:
            self._next += 1
        end = self._next + SLICE_CASES
        if self.plan.cases is not None:
            end = min(end, self.plan.seed + self.plan.cases)
        end = next((seed for seed in range(self._next, end) if seed in self._done), end)
        if end <= self._next:
            return None
        first, self._next = self._next, end
        return Hunt(first, end - first)

    # What was done.

    def _listen(self) -> None:
        for worker, word in self._team.listen([worker for worker in self._workers if worker.task], LISTEN_S):
            task, worker.task = worker.task, None
            match word:
                case Hunted():
                    self._begun = True
                    self._hunted(word, task)
                case Shrunk():
                    self._shrunk(word)
                case Recalled(file=file, known=known, not_run=why):
                    self._begun = True
                    self._recalled(file, known, why)
                case Grown(megabytes=megabytes):
                    self._leaks.append(megabytes)
                    self._dismiss(worker)
                    self._give_back(task)
                case Unplaced():
                    self._unplaced += 1
                    self._dismiss(worker)
                    self._give_back(task)
                    self._jobs = max(1, len(self._workers))
                case Refusal(message=message):
                    raise CampaignError(message)
                case Died():
                    self._dismiss(worker)
                    self._died(word, task)
                case Hung():
                    self._dismiss(worker)
                    self._hung(word, task)

    def _hunted(self, report: Hunted, task: Task | None) -> None:
        self._ledger.hunted(report.first, report.count, report.tally, report.failed)
        self._tally.merge(report.tally)
        self._done.update(range(report.first, report.first + report.count))
        self._count(report.failed)
        if isinstance(task, Hunt) and report.count < task.count:
            self._again.append(range(report.first + report.count, task.first + task.count))

    def _recalled(self, file: str, known: Sequence[Known], why_not: str) -> None:
        """What the file shows is known; or it will not be, for a reason."""
        self._shown[file] = known
        if why_not:
            self._not_recalled[file] = why_not
        if not self._recalling:
            self._known |= {one.signature: one.source for file in self._files for one in self._shown[file]}
            self._count()

    @property
    def _recalling(self) -> list[str]:
        """The files that are still to be run: nothing is new before."""
        return [file for file in self._files if file not in self._shown]

    def _count(self, failing: Sequence[Failed] = ()) -> None:
        """Each case under what it is reported as, and under all that it shows of what is known; once that is known."""
        self._failing += len(failing)
        self._uncounted += failing
        while self._uncounted and not self._recalling:
            failed = self._uncounted.popleft()
            reported = Signature.of(primary(failed.findings, self._known))
            known = self._known.keys() & map(Signature.of, failed.findings)
            for signature in (reported, *sorted(known - {reported})):
                self._failure(signature, failed).count += 1

    def _failure(self, signature: Signature, failed: Failed) -> Failure:
        if signature not in self._failures:
            failure = Failure(signature=signature, first=failed, known=self._known.get(signature))
            self._failures[signature] = failure
            if failure.known is None:
                self._to_shrink.append(failure)
        return self._failures[signature]

    def _shrunk(self, report: Shrunk) -> None:
        if report.finding is not None:
            failure = self._failures[report.signature]
            failure.minimal, failure.ended, failure.finding = report.case, report.ended, report.finding

    def _died(self, died: Died, task: Task | None) -> None:
        """Once may be anybody's doing: the slice is run again. Twice in one case is the engine's."""
        self._deaths += 1
        if not self._begun and self._deaths >= STILLBORN:
            raise CampaignError(f"{STILLBORN} processes {died.how} before any case was done; does `caesura run` start this engine?")
        if died.seed is not None:
            self._deaths_at[died.seed] += 1
        culprit = died.seed if died.seed is not None and self._deaths_at[died.seed] >= 2 else None
        self._again_without(culprit, task, f"the engine's process {died.how}")

    def _hung(self, hung: Hung, task: Task | None) -> None:
        self._deaths += 1
        sentence = f"the engine hangs: no answer within {hung.limit_s:g} s, and it cannot be interrupted"
        self._again_without(hung.seed, task, sentence, hung.stack)

    def _again_without(self, seed: int | None, task: Task | None, sentence: str, stack: str = "") -> None:
        """Run a lost slice again, less the seed that took the worker down, which is a finding. A lost shrinking stays lost."""
        if isinstance(task, Recall):
            self._lost_at(task, sentence)
        if not isinstance(task, Hunt):
            return
        end = task.first + task.count
        if seed is None:
            self._again.append(range(task.first, end))
            return
        finding = Finding(id=API_TRUTH, operations=0, seq=0, sentence=sentence, detail=stack)
        lost = Hunted(seed, 1, Tally(cases=1), (Failed(seed=seed, findings=(finding,)),))
        self._hunted(lost, None)
        self._to_shrink = deque(one for one in self._to_shrink if one.first.seed != seed)
        self._again += [part for part in (range(task.first, seed), range(seed + 1, end)) if len(part)]

    def _lost_at(self, recall: Recall, sentence: str) -> None:
        """A file is run again, after the others; lost twice, it is named."""
        if recall.file in self._lost:
            self._recalled(recall.file, (), sentence)
        else:
            self._lost.add(recall.file)
            self._untouched.append(recall)

    def _give_back(self, task: Task | None) -> None:
        """What a worker was given that had just stopped taking any; nobody has begun with it."""
        if isinstance(task, Hunt):
            self._again.append(range(task.first, task.first + task.count))
        elif task is not None:
            self._untouched.append(task)

    def _dismiss(self, worker: Worker) -> None:
        worker.end()
        self._workers.remove(worker)

    def _finish_under_way(self) -> None:
        """After Ctrl-C: hear what the slices under way have brought; a second Ctrl-C, and that is left."""
        until = time.monotonic() + CLOSING_S
        try:
            while any(isinstance(worker.task, Hunt) for worker in self._workers) and time.monotonic() < until:
                self._listen()
        except KeyboardInterrupt:
            pass

    def _merged(self) -> list[Failure]:
        """One failure for each minimal case's signature: a sentence may only become the same when all else is gone."""
        merged: dict[Signature, Failure] = {}
        for failure in self._failures.values():
            signature = Signature.of(failure.finding) if failure.finding is not None else failure.signature
            failure.signature, failure.known = signature, failure.known or self._known.get(signature)
            if (first := merged.setdefault(signature, failure)) is not failure:
                first.count += failure.count
        return list(merged.values())
