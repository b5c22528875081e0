"""An engine in virtual time: the model decides what a step does, the latency model when it ends.

Calls are taken up the moment that they come, between the launch of a step and its landing too, as the core of an
engine does that lets its forward pass run. What is called, answered and sampled is written as it happens; a step
that nothing came in between of is one line, at the time of its landing, as in lockstep.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import simpy

from harness.events import Called, Committed, Delivered, Event, Finished, FinishReason, Launched, Resumed, Returned
from harness.execute import Journal
from harness.model import CAESURA, EngineModel
from harness.model.symbolic import symbolic_token
from harness.operations import Operation, Submit, to_data
from harness.scenario import EngineShape
from harness.simulation.environment import Environment, Process
from harness.simulation.latency import StepCost
from harness.simulation.signal import Signal


class Stream:
    """What a client is handed of its request."""

    __slots__ = ("ended", "tokens")

    def __init__(self, ended: simpy.Event) -> None:
        self.tokens: list[int] = []
        self.ended = ended
        """Its value is the finish reason."""


class VirtualEngine:
    """One engine: a process that steps, and calls to it."""

    def __init__(self, env: Environment, shape: EngineShape, journal: Journal, cost: StepCost, *, seed: int) -> None:
        self.model = EngineModel(shape, profile=CAESURA)
        self.steps = 0
        """Steps launched."""
        self.launched = Signal(env)
        self.ended = Signal(env)
        """A request ended."""
        self.committed = Signal(env)
        self.resumed = Signal(env)
        self.told = Signal(env)
        """Something was written to the log."""
        self._called = Signal(env)
        self._env = env
        self._journal = journal
        self._cost = cost
        self._seed = seed
        self.next_op = 0
        """Number of the next call."""
        self._calls: dict[int, simpy.Event] = {}
        self._streams: dict[str, Stream] = {}
        self._landings_ns: deque[int] = deque()
        """When the steps in flight end, oldest first: the device runs one after the other."""
        self._unwritten: list[Event] = []
        """Events of the newest launch, and its time, until something else happens."""
        self._launched_ns = 0

    def call(self, operation: Operation, by: str) -> simpy.Event:
        """Hand an operation to the core now; the value of the event that is returned is the call's `returned`."""
        op, self.next_op = self.next_op, self.next_op + 1
        returned = self._calls[op] = self._env.event()
        self._write_launch()
        called = Called(op=op, operation=to_data(operation), by=by)
        self._write(self._env.now_ns, [called, *self.model.apply(op, operation)])
        self._called.fire()
        return returned

    def submit(self, submit: Submit, by: str) -> Stream | None:
        """Hand in a request; None if it is rejected, as it came late.

        Raises:
            RuntimeError: it was refused for another reason, so that its client could only go wrong.
        """
        stream = self._streams[submit.id] = Stream(self._env.event())
        returned = self.call(submit, by).value
        assert isinstance(returned, Returned), f"{submit.id} was not answered at once"
        if returned.error is None:
            return stream
        del self._streams[submit.id]
        if returned.error.code != "rejected":
            raise RuntimeError(f"{submit.id} was refused: {returned.error.message}")
        return None

    def run(self) -> Process:
        """The process: launch what may be launched, wait, land what has to land."""
        while True:
            if self.model.launch_due:
                self._launch()
            elif not self.model.landing_due:
                yield self._called.wait()
            elif (left_ns := self._landings_ns[0] - self._env.now_ns) > 0:
                yield self._env.timeout(left_ns)
            else:
                self._land()
                yield self._env.timeout(0)  # whoever was told something now may act before the next launch, or after it

    def _launch(self) -> None:
        self._write_launch()
        self._unwritten, self._launched_ns = self.model.schedule(), self._env.now_ns
        last = self._unwritten[-1] if self._unwritten else None
        if isinstance(last, Launched):
            self.steps += 1
            begins_ns = max([self._env.now_ns, *self._landings_ns])
            self._landings_ns.append(begins_ns + self._cost(last.batch))
            self.launched.fire()

    def _land(self) -> None:
        self._landings_ns.popleft()
        epoch, seed = self.model.landing_epoch, self._seed
        landed = self.model.land(lambda request, position: symbolic_token(request, position, epoch, seed))
        events, self._unwritten = [*self._unwritten, *landed], []
        self._write(self._env.now_ns, events)

    def _write_launch(self) -> None:
        events, self._unwritten = self._unwritten, []
        if events:
            self._write(self._launched_ns, events)

    def _write(self, t_ns: int, events: Sequence[Event]) -> None:
        """Write a transaction, then let everyone go on who waited for something in it."""
        self._journal.now_ns = t_ns
        self._journal.write(events)
        for event in events:
            match event:
                case Delivered(outputs=outputs):
                    for request, _, tokens, reason in outputs:
                        self._deliver(request, tokens, reason)
                case Returned(op=op):
                    self._calls.pop(op).succeed(event)
                case Finished():
                    self.ended.fire()
                case Committed():
                    self.committed.fire()
                case Resumed():
                    self.resumed.fire()
        self.told.fire()

    def _deliver(self, request: str, tokens: Sequence[int], reason: FinishReason | None) -> None:
        stream = self._streams.get(request)
        if stream is None:
            return  # a request of the timeline: nobody waits for it
        stream.tokens += tokens
        if reason is not None:
            del self._streams[request]
            stream.ended.succeed(reason)
