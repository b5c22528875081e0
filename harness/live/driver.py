"""Scenario x live engine -> the client's log: carries out a timeline in real time.

The timeline falls into chains, as in lockstep. A chain starts when its trigger is true: of what a client hears and
is answered, and of what the log of a rank tells while it is being written. What nobody shows, an engine of
level 0 its steps, never comes true; the entry is then reported as one that never fired. `step` and `advance` let
the engine make steps, or real time pass. Calls do not block. Once nothing is due and nothing can happen any more
unless somebody calls, the run is over; every wait has a bound.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from harness.backends import CallRefused, LiveBackend
from harness.client import ClientCall, ClientView
from harness.events import Accepted, Admitted, Answered, Asked, Blocked, Closed, Entry, Event, Failure, Heard, Launched, Output, Preempted
from harness.execute import NS_PER_MS, EngineCrashed, Journal, Listener, Timeline, crash_in, with_token_ids
from harness.interrupts import Interrupts, held_back
from harness.live.rank import Rank
from harness.operations import Abort, Operation, Pause, Resume, Sleep, Submit, in_words, to_data
from harness.scenario import Scenario

POLL_S = 0.002
"""How often logs of ranks are looked at."""
IDLE_S = 0.02
"""How often Ctrl-C and the bounds are looked at where there is no such log."""
SETTLED_NS = {True: 10 * NS_PER_MS, False: 250 * NS_PER_MS}
"""For how long nothing must have happened before the engine counts as held back, with logs of ranks and without."""
BROKEN_OFF_NS = 1000 * NS_PER_MS
"""If nobody is left to be answered and nothing happens for so long, a rank whose log speaks of live requests has stopped writing it."""
LEAVE_S = 5.0
"""How long the engine is given to let go of its requests when the run is over."""

ONLY_RANKS_SHOW = (Launched, Accepted, Blocked, Admitted, Preempted)
"""What triggers ask about and no client sees."""


class Live:
    """One run of a scenario on a started live engine.

    Args:
        listeners: hear each of the client's transactions right after it happened.
        ranks: logs that the engine is writing; none for an engine of level 0.
        afterwards: operations that follow the timeline, each as soon as the engine has come to rest after the one before.
        recompute: called when the run has ended by itself and the logs of the ranks are closed; its events come before `closed`.
    """

    def __init__(
        self,
        scenario: Scenario,
        backend: LiveBackend,
        listeners: Sequence[Listener],
        *,
        ranks: Sequence[Rank] = (),
        base_ns: int = 0,
        afterwards: Iterable[Operation] = (),
        recompute: Callable[[], Sequence[Event]] = tuple,
    ) -> None:
        self._backend = backend
        self._ranks = ranks
        self._base_ns = base_ns
        self._bound_ns = round(scenario.bound_ms * NS_PER_MS)
        self._afterwards = iter(afterwards)
        self._recompute = recompute
        self._timeline = Timeline(scenario.timeline)
        self._view = ClientView()
        self._journal = Journal("client", (self._timeline.facts.hear, self._follow, *listeners))
        self._tasks: set[asyncio.Task[None]] = set()
        self._asked_ns: list[int] = []
        """When each call was made, by number."""
        self._news = asyncio.Event()
        self._news_ns = self._heard_ns = 0
        """When anything last happened, and when the client last had a part in it."""
        self._crash: EngineCrashed | None = None
        self._over = False

    async def run(self, opened: Event) -> None:
        """Carry out the whole timeline, or up to Ctrl-C; then end the logs and leave nothing paused and nothing running.

        The `closed` event says why the run ended: drained, paused (with live requests), out-of-service, stalled (a bound was
        exceeded), failed (a forward pass broke), crashed (the engine died), or interrupted.
        """
        self._write(opened)
        why = "interrupted"
        try:
            with held_back() as interrupts:
                why = await self._loop(interrupts)
        finally:
            self._over = True
            await self._close(why)
            await self._leave()

    async def _close(self, why: str) -> None:
        await self._backend.end(why)
        recomputed = () if why in ("interrupted", "crashed") else self._recompute()
        self._journal.now_ns = self._now_ns()
        self._journal.write(recomputed)
        error = str(self._crash) if self._crash else ""
        self._journal.write([Closed(why=why, count=self._journal.seq, unfired=self._timeline.unfired(), error=error)])

    async def _loop(self, interrupts: Interrupts) -> str:
        while not interrupts.asked:
            self._news.clear()
            self._read_ranks()
            self._timeline.fire(self._now_ns, self._call)
            if (why := self._why_over()) is not None:
                return why
            with suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), self._patience_s())
        return "interrupted"

    def _patience_s(self) -> float:
        """Until the next entry with a delay is due, or something has to be looked at."""
        most = POLL_S if self._ranks else IDLE_S
        next_ns = self._timeline.next_ns
        return most if next_ns is None else max(0.0, min(most, (next_ns - self._now_ns()) / 1e9))

    # Calls.

    def _call(self, operation: Operation, name: str | None) -> None:
        operation = with_token_ids(operation, self._backend.tokenize)
        number, now_ns = len(self._asked_ns), self._now_ns()
        self._asked_ns.append(now_ns)
        if name is not None:
            self._timeline.facts.name_call(number, name, now_ns)
        self._write(Asked(call=number, operation=to_data(operation)))
        task = asyncio.get_running_loop().create_task(self._wait_for(number, operation))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _wait_for(self, number: int, operation: Operation) -> None:
        try:
            with crash_in(f"call #{number}, {in_words(operation)}"):
                answered = await self._answer(number, operation)
        except EngineCrashed as crash:
            self._crash = self._crash or crash
            self._news.set()
        else:
            self._write(answered)

    async def _answer(self, number: int, operation: Operation) -> Answered:
        try:
            answer = await self._backend.call(operation, self._hear)
        except CallRefused as refused:
            return Answered(call=number, answer=None, error=Failure(refused.code, str(refused)), status=refused.status)
        return Answered(call=number, answer=answer.content, error=None, status=answer.status)

    def _hear(self, outputs: Sequence[Output]) -> None:
        self._write(Heard(outputs=tuple(outputs)))

    def _write(self, event: Event) -> None:
        if self._over:
            return
        self._journal.now_ns = self._heard_ns = self._news_ns = self._now_ns()
        self._journal.write([event])
        self._news.set()

    def _now_ns(self) -> int:
        return time.monotonic_ns() - self._base_ns

    # What is known of the engine.

    def _follow(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            self._view.apply(entry.seq, entry.event)

    def _read_ranks(self) -> None:
        for rank in self._ranks:
            if events := rank.news():
                self._news_ns = now_ns = self._now_ns()
                shown = [Entry(0, now_ns, "rank", event) for event in events if isinstance(event, ONLY_RANKS_SHOW)]
                self._timeline.facts.hear(shown)

    def _why_over(self) -> str | None:
        """Why the run is over; None if something is due, may still happen, or was just set going."""
        if self._crash is not None:
            return "crashed"
        if any(rank.failed for rank in self._ranks):
            return "failed"
        if self._timeline.next_ns is not None:
            return None
        if self._at_rest():
            return None if self._timeline.end_step_waits() or self._goes_on() else self._why_at_rest()
        return "stalled" if self._overdue() else None

    def _goes_on(self) -> bool:
        """Ask for the next of the operations that follow the timeline, if all of that was carried out."""
        if self._timeline.chains or (operation := next(self._afterwards, None)) is None:
            return False
        self._call(operation, None)
        return True

    def _at_rest(self) -> bool:
        """Nothing can happen unless somebody calls: all that is not answered are requests that the engine holds back."""
        calls = self._view.calls.values()
        waits, quiet_ns = self._timeline.chains or calls, self._now_ns() - self._news_ns
        if not waits and quiet_ns > BROKEN_OFF_NS:
            return True
        if any(not isinstance(call.operation, Submit) for call in calls):
            return False
        if self._ranks:
            if not all(rank.at_rest and not self._lags(rank) for rank in self._ranks) or not all(map(self._is_held, calls)):
                return False
        elif calls and not (self._view.paused_since >= 0 or self._view.out_of_service):
            return False
        return not waits or quiet_ns > SETTLED_NS[bool(self._ranks)]

    def _lags(self, rank: Rank) -> bool:
        """Its log does not tell yet of something that clients were answered."""
        if self._view.running_since >= 0:
            return rank.replay.pause_mode is not None
        return self._view.paused_since >= 0 and rank.replay.pause_mode is None

    def _is_held(self, call: ClientCall) -> bool:
        return isinstance(call.operation, Submit) and any(rank.holds(call.operation.id) for rank in self._ranks)

    def _why_at_rest(self) -> str:
        """As the lockstep executor says it."""
        ranks = self._ranks
        if any(rank.replay.out_of_service for rank in ranks) or (not ranks and self._view.out_of_service):
            return "out-of-service"
        if not self._view.calls:
            return "drained"
        return "paused" if not ranks or any(rank.held_back for rank in ranks) else "stalled"

    def _overdue(self) -> bool:
        """An answer that needs no waiting is late, or nothing was heard for as long while something is waited for."""
        now_ns, calls = self._now_ns(), self._view.calls.values()
        since_ns = [self._news_ns, *([self._heard_ns] if calls else [])]
        since_ns += [self._asked_ns[call.number] for call in calls if not _may_wait(call.operation)]
        return now_ns - min(since_ns) > self._bound_ns

    # The end.

    async def _leave(self) -> None:
        """Whatever the run left: abort it and resume, so that an engine that outlives the run is as it was found."""
        if self._crash is None:
            for operation in (Abort(ids="all"), Resume()):
                with suppress(Exception):
                    await asyncio.wait_for(self._backend.call(operation, lambda outputs: None), LEAVE_S)
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=LEAVE_S)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _may_wait(operation: Operation | None) -> bool:
    """Whether its answer may wait for requests to end."""
    return operation is None or isinstance(operation, Submit) or (isinstance(operation, Pause | Sleep) and operation.mode == "wait")
