"""How a workload fared: a function of the log, whoever wrote it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from harness.events import (
    Called,
    Delivered,
    Entry,
    Launched,
    Output,
    PauseEffective,
    PausePending,
    Preempted,
    Resumed,
    Scheduled,
)
from harness.scenario import ROLLOUT_ID, Workload
from harness.simulation.ledger import TRAINER, Ledger, Trajectory, rollout_of


@dataclass(kw_only=True)
class Figures:
    """Times are virtual, in nanoseconds; a rollout counts from its first request's call, whatever happened to that one."""

    rollouts: int
    """How many were handed in."""
    duration_ns: int = 0
    steps: int = 0
    tokens: int = 0
    """Delivered to clients, those of rollouts that were begun anew included."""
    computed: int = 0
    """Tokens that forward passes computed, prompts included."""
    recomputed: int = 0
    """Those of them that had been computed for the same rollout before: after a preemption, a clear or an abort."""
    preemptions: int = 0
    latencies_ns: list[int] = field(default_factory=list)
    """Of each rollout that ended, to its last token."""
    first_tokens_ns: list[int] = field(default_factory=list)
    """Of each rollout that has one, to its first token."""
    updates: int = 0
    draining_ns: int = 0
    """From pauses being taken up to their taking effect."""
    held_ns: int = 0
    """From there to the resumes: no token was generated."""
    staleness: dict[int, int] = field(default_factory=dict)
    """Rollouts by how many updates were made between their oldest token and the batch that they were trained in; without
    batches, their end."""
    trained_tokens: int = 0
    dropped: int = 0
    """Rollouts that were too old to be trained on."""


def figures_of(entries: Sequence[Entry], workload: Workload) -> Figures:
    """Read the figures of a simulated workload from its log."""
    reader = _Reader(workload)
    for entry in entries:
        reader.read(entry)
    return reader.finish(entries[-1].t_ns)


class _Reader:
    def __init__(self, workload: Workload) -> None:
        self._figures = Figures(rollouts=0)
        self._ledger = Ledger(workload)
        self._batches = workload.trainer is not None and workload.trainer.batch is not None
        self._staleness: Counter[int] = Counter()
        self._begun_ns: dict[str, int] = {}
        """When each rollout was handed in, by name."""
        self._waiting: dict[str, int] = {}
        """Those of them that have no token yet."""
        self._reached: dict[str, list[int]] = {}
        """How many tokens of its rollout were computed, by request; its attempts share one list of one number."""
        self._pending_ns: int | None = None
        self._effective_ns: int | None = None

    def read(self, entry: Entry) -> None:
        t_ns, event = entry.t_ns, entry.event
        self._ledger.hear([entry])
        match event:
            case Called(operation={"submit": {"id": request}}) if ROLLOUT_ID.match(request):
                self._hand_in(request, t_ns)
            case Called(operation={"pause": _}, by=by) if by == TRAINER and self._batches:
                self._train(self._ledger.take() or ())
            case Launched(batch=batch):
                self._figures.steps += 1
                for row in batch:
                    self._compute(row)
            case Delivered(outputs=outputs):
                for output in outputs:
                    self._deliver(output, t_ns)
            case Preempted():
                self._figures.preemptions += 1
            case PausePending() if self._pending_ns is None:
                self._pending_ns = t_ns
            case PauseEffective() if self._effective_ns is None:
                self._effective_ns = t_ns
            case Resumed():
                self._resume(t_ns)

    def finish(self, t_ns: int) -> Figures:
        figures, ledger = self._figures, self._ledger
        figures.duration_ns = t_ns
        figures.rollouts = len(self._begun_ns)
        figures.updates = ledger.version
        figures.dropped = ledger.dropped
        if not self._batches:
            self._staleness.update(ended - oldest for oldest, ended, _ in ledger.ended)
        figures.staleness = dict(sorted(self._staleness.items()))
        return figures

    def _hand_in(self, request: str, t_ns: int) -> None:
        name = rollout_of(request)
        if name not in self._begun_ns:
            self._begun_ns[name] = self._waiting[name] = t_ns
            self._reached[name] = [0]
        self._reached[request] = self._reached[name]

    def _compute(self, row: Scheduled) -> None:
        self._figures.computed += row.count
        reached = self._reached.get(row.request)
        if reached is None:
            return
        end = row.first + row.count
        self._figures.recomputed += max(0, min(reached[0], end) - row.first)
        reached[0] = max(reached[0], end)

    def _deliver(self, output: Output, t_ns: int) -> None:
        self._figures.tokens += len(output.tokens)
        if output.first > 0 and output.finish_reason in (None, "abort"):
            return  # the common case: a token in the middle
        name = rollout_of(output.request)
        if output.tokens and name in self._waiting:
            self._figures.first_tokens_ns.append(t_ns - self._waiting.pop(name))
        if output.finish_reason not in (None, "abort") and name in self._begun_ns:
            self._figures.latencies_ns.append(t_ns - self._begun_ns[name])

    def _train(self, batch: Sequence[Trajectory]) -> None:
        self._staleness.update(self._ledger.version - trajectory.oldest for trajectory in batch)
        self._figures.trained_tokens += sum(trajectory.tokens for trajectory in batch)

    def _resume(self, t_ns: int) -> None:
        if self._pending_ns is not None and self._effective_ns is not None:
            self._figures.draining_ns += self._effective_ns - self._pending_ns
            self._figures.held_ns += t_ns - self._effective_ns
        self._pending_ns = self._effective_ns = None
