"""Scenario x backend -> log: carries out a timeline in lockstep, in virtual time.

The timeline falls into *chains*: an entry with a trigger, and the entries
without one that follow it. A chain starts at the first step boundary at which
its trigger is true and then calls its entries one after the other; `step` and
`advance` suspend it, not the others. Calls do not block: a pause may be pending
while later entries fire. With nothing due, the engine steps if it has work;
without work, time jumps to the next delayed trigger; with neither, the run ends.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from harness.backends import Backend
from harness.events import (
    Accepted,
    Admitted,
    Answered,
    Blocked,
    Called,
    Closed,
    Delivered,
    Entry,
    Event,
    Finished,
    Heard,
    Launched,
    Output,
    Preempted,
    Returned,
    StepFailed,
)
from harness.interrupts import Interrupts, held_back
from harness.operations import Advance, Operation, Prompt, Step, Submit, in_words, to_data
from harness.scenario import Scenario, TimelineEntry, When

NS_PER_MS = 1_000_000
STALLED_STEPS = 10_000
"""Steps in a row that deliver nothing and end nothing before a run is given up as stalled; prefills deliver nothing for a while."""

Listener = Callable[[Sequence[Entry]], object]
"""Hears each transaction right after it happened."""


class Journal:
    """Numbers and times events and passes each transaction on."""

    def __init__(self, writer: str, listeners: Sequence[Listener]) -> None:
        self.writer = writer
        self.listeners = listeners
        self.seq = 0
        self.now_ns = 0

    def write(self, events: Sequence[Event]) -> None:
        if not events:
            return
        entries = [Entry(self.seq + i, self.now_ns, self.writer, event) for i, event in enumerate(events)]
        for listener in self.listeners:
            listener(entries)
        self.seq += len(entries)


class EngineCrashed(Exception):
    """The engine raised something that is no answer."""


@contextmanager
def crash_in(what: str) -> Iterator[None]:
    """An exception of the engine in `what` becomes an EngineCrashed that says so in one line."""
    try:
        yield
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{Path(frame.filename).name}:{frame.lineno}"
        raise EngineCrashed(f"in {what}: {type(error).__name__}: {error} ({place})") from error


class Facts:
    """What triggers ask about, with the virtual time at which each became true."""

    def __init__(self) -> None:
        self.steps = 0
        self.stalled_steps = 0
        self.failed = False
        """A forward pass broke: the engine makes no step any more."""
        self._since: dict[tuple, int] = {("step", 0): 0}
        self._names: dict[int, str] = {}

    def name_call(self, op: int, name: str, now_ns: int) -> None:
        self._names[op] = name
        self._since.setdefault(("called", name), now_ns)

    def since(self, when: When) -> int | None:
        """The time at which the condition became true, None if it has not."""
        if when.request is not None:
            what = ("tokens", when.tokens) if when.tokens is not None else ("state", when.state)
            return self._since.get((*what, when.request))
        if when.returned is not None:
            return self._since.get(("returned", when.returned))
        if when.called is not None:
            return self._since.get(("called", when.called))
        if when.step is not None:
            return self._since.get(("step", when.step))
        return 0

    def hear(self, entries: Sequence[Entry]) -> None:
        """A listener: takes note of a transaction."""
        for _, now_ns, _, event in entries:
            match event:
                case Launched():
                    self.steps += 1
                    self.stalled_steps += 1
                    self._since.setdefault(("step", self.steps), now_ns)
                case StepFailed():
                    self.failed = True
                case Delivered(outputs=outputs):
                    self.stalled_steps = 0
                    self._hear_outputs(outputs, now_ns)
                case Heard(outputs=outputs):
                    self._hear_outputs(outputs, now_ns)
                case Returned(op=op) | Answered(call=op) if op in self._names:
                    self._since.setdefault(("returned", self._names[op]), now_ns)
                case Accepted(request=request):
                    self._since.setdefault(("state", "accepted", request), now_ns)
                case Blocked(request=request):
                    self._since.setdefault(("state", "blocked", request), now_ns)
                case Admitted(request=request):
                    self._since.setdefault(("state", "running", request), now_ns)
                case Preempted(request=request):
                    self._since.setdefault(("state", "preempted", request), now_ns)
                case Finished(request=request):
                    self._since.setdefault(("state", "finished", request), now_ns)
                case _:
                    pass

    def _hear_outputs(self, outputs: Sequence[Output], now_ns: int) -> None:
        for output in outputs:
            for index in range(output.first + 1, output.first + len(output.tokens) + 1):
                self._since.setdefault(("tokens", index, output.request), now_ns)
            if output.finish_reason is not None:
                self._since.setdefault(("state", "finished", output.request), now_ns)


class Chain:
    """Consecutive timeline entries of which only the first may have a trigger."""

    def __init__(self, entries: Sequence[TimelineEntry]) -> None:
        self.entries = entries
        self.position = 0
        self.resume_at_step: int | None = None
        self.resume_at_ns: int | None = None

    @property
    def rest(self) -> Sequence[TimelineEntry]:
        return self.entries[self.position :]

    def due_ns(self, facts: Facts) -> int | None:
        """The time from which this chain may go on, None if that is not known yet."""
        if self.position == 0:
            when = self.entries[0].when
            if when is None:
                return 0
            since = facts.since(when)
            return None if since is None else since + round((when.ms or 0) * NS_PER_MS)
        if self.resume_at_step is not None:
            return 0 if facts.steps >= self.resume_at_step else None
        return self.resume_at_ns or 0


def chains_of(timeline: Sequence[TimelineEntry]) -> list[Chain]:
    chains: list[list[TimelineEntry]] = []
    for entry in timeline:
        if entry.when is not None or not chains:
            chains.append([])
        chains[-1].append(entry)
    return [Chain(entries) for entries in chains]


class Timeline:
    """The chains that have entries left, and the facts that their triggers ask about."""

    def __init__(self, entries: Sequence[TimelineEntry]) -> None:
        self.facts = Facts()
        self.chains = chains_of(entries)

    @property
    def next_ns(self) -> int | None:
        """When the next chain is due, as far as that is known; it may be past."""
        return min((due for chain in self.chains if (due := chain.due_ns(self.facts)) is not None), default=None)

    def fire(self, clock: Callable[[], int], call: Callable[[Operation, str | None], None]) -> None:
        """Let every chain that is due go on, in file order, until none is: each entry's operation and name are given to `call`."""
        while (chain := next(self._due(clock()), None)) is not None:
            self._advance(chain, clock, call)
            self.chains = [chain for chain in self.chains if chain.rest]

    def end_step_waits(self) -> bool:
        """No further step will come: chains that wait for one go on. Returns whether any did."""
        waiting = [chain for chain in self.chains if chain.resume_at_step is not None]
        for chain in waiting:
            chain.resume_at_step = None
        return bool(waiting)

    def unfired(self) -> tuple[str, ...]:
        """The entries that are left, in words."""
        return tuple(f"line {entry.line}: {in_words(entry.operation)}" for chain in self.chains for entry in chain.rest)

    def _due(self, now_ns: int) -> Iterator[Chain]:
        for chain in self.chains:
            due_ns = chain.due_ns(self.facts)
            if due_ns is not None and due_ns <= now_ns:
                yield chain

    def _advance(self, chain: Chain, clock: Callable[[], int], call: Callable[[Operation, str | None], None]) -> None:
        """Call the chain's entries up to and including its next `step` or `advance`."""
        chain.resume_at_step = chain.resume_at_ns = None
        for entry in chain.rest:
            chain.position += 1
            match entry.operation:
                case Step():
                    chain.resume_at_step = self.facts.steps + 1
                    return
                case Advance(steps=int(steps)):
                    chain.resume_at_step = self.facts.steps + steps
                    return
                case Advance(ms=float(ms) | int(ms)):
                    chain.resume_at_ns = clock() + round(ms * NS_PER_MS)
                    return
                case operation:
                    call(operation, entry.name)


def with_token_ids(operation: Operation, tokenize: Callable[[str], tuple[int, ...]]) -> Operation:
    """A prompt as the token ids that it stands for, so that a log means the same to every later reader."""
    if not isinstance(operation, Submit):
        return operation
    prompt = operation.prompt
    tokens = prompt.token_ids if prompt.token_ids is not None else tokenize(prompt.text or "")
    return operation.model_copy(update={"prompt": Prompt(text=prompt.text, tokens=tokens)})


class Lockstep:
    """One run of a scenario on a started backend."""

    def __init__(
        self,
        scenario: Scenario,
        backend: Backend,
        listeners: Sequence[Listener],
        *,
        writer: str = "r0",
        recompute: Callable[[], Sequence[Event]] = tuple,
        differed: Callable[[], Sequence[Event]] = tuple,
    ) -> None:
        """
        Args:
            recompute: called when the run has ended by itself; its events come before `closed`.
            differed: called at every end; its events come right before `closed`.
        """
        self.scenario = scenario
        self.backend = backend
        self.timeline = Timeline(scenario.timeline)
        self.facts = self.timeline.facts
        self.journal = Journal(writer, (self.facts.hear, *listeners))
        self.step_ns = round(scenario.latency.step_ms * NS_PER_MS)
        self.ops = 0
        self.recompute = recompute
        self.differed = differed

    def run(self, opened: Event) -> None:
        """Carry out the whole timeline, or up to Ctrl-C.

        The `closed` event says why the run ended: drained, paused (with live requests), out-of-service, stalled, failed,
        crashed (the engine raised), or interrupted.
        """
        self.journal.write([opened])
        error = ""
        with held_back() as interrupts:
            try:
                why = self._loop(interrupts)
                if why != "interrupted":
                    self.journal.write(self.recompute())
            except EngineCrashed as crash:
                why, error = "crashed", str(crash)
        self._close(why, error)

    def _close(self, why: str, error: str) -> None:
        self.journal.write(self.differed())
        self.journal.write([Closed(why=why, count=self.journal.seq, unfired=self.timeline.unfired(), error=error)])

    def _loop(self, interrupts: Interrupts) -> str:
        while not interrupts.asked:
            self.timeline.fire(lambda: self.journal.now_ns, self._call)
            if self.facts.failed:
                return "failed"
            if self.facts.stalled_steps >= STALLED_STEPS:
                return "stalled"
            if self.backend.has_work():
                self._step()
            elif not (self.timeline.end_step_waits() or self._jump()):
                return self._why_idle()
        return "interrupted"

    def _call(self, operation: Operation, name: str | None) -> None:
        operation = with_token_ids(operation, self.backend.tokenize)
        op, self.ops = self.ops, self.ops + 1
        if name is not None:
            self.facts.name_call(op, name, self.journal.now_ns)
        called = Called(op=op, operation=to_data(operation), by="timeline")
        with crash_in(f"call #{op}, {in_words(operation)}"):
            done = self.backend.apply(op, operation)
        self.journal.write([called, *done])

    def _step(self) -> None:
        self.journal.now_ns += self.step_ns
        with crash_in(f"step {self.facts.steps + 1}"):
            done = self.backend.step()
        self.journal.write(done)

    def _jump(self) -> bool:
        """Move time to the next chain that is due in the future."""
        if (next_ns := self.timeline.next_ns) is None:
            return False
        self.journal.now_ns = next_ns
        return True

    def _why_idle(self) -> str:
        state = self.backend.state()
        if state.out_of_service:
            return "out-of-service"
        live = state.running or state.waiting or state.blocked
        if not live:
            return "drained"
        return "paused" if state.pause_mode is not None else "stalled"
