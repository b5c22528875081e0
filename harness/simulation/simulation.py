"""One simulation: a scenario's workload, trainer and timeline around an engine, until nothing is left to happen."""

from __future__ import annotations

from collections.abc import Sequence

from harness.events import Closed, Event
from harness.execute import Facts, Journal, Listener
from harness.scenario import Scenario
from harness.simulation.engine import VirtualEngine
from harness.simulation.environment import Environment
from harness.simulation.latency import step_cost
from harness.simulation.ledger import Ledger
from harness.simulation.rollouts import Clients, rollouts_of
from harness.simulation.streams import stream
from harness.simulation.timeline import TimelineProcesses
from harness.simulation.trainer import TrainerProcess


class Simulation:
    """A run of a scenario that has a workload.

    Args:
        listeners: hear each transaction right after it happened.
        seed: everything random comes from it, the order of simultaneous events too.
        ties: the seed of that order alone; by default `seed`.
    """

    def __init__(self, scenario: Scenario, listeners: Sequence[Listener], *, seed: int = 0, ties: int | None = None) -> None:
        workload = scenario.workload
        if workload is None:
            raise ValueError(f"{scenario.name} has no workload: carry its timeline out with harness.execute.Lockstep")
        self._env = Environment(stream(seed if ties is None else ties, "ties"))
        self._ledger, facts = Ledger(workload), Facts()
        asks = [facts.hear] if scenario.timeline else []
        self._journal = Journal("r0", [self._ledger.hear, *asks, *listeners])
        self._engine = VirtualEngine(self._env, scenario.engine, self._journal, step_cost(scenario.latency), seed=seed)
        self._clients = Clients(self._env, self._engine, self._ledger, workload, rollouts_of(workload, scenario.engine, seed))
        self._timeline = TimelineProcesses(self._env, self._engine, scenario.timeline, facts)
        self._env.process(self._engine.run())
        self._clients.start(seed)
        self._timeline.start()
        if workload.trainer is not None:
            self._env.process(TrainerProcess(self._env, self._engine, self._ledger, workload.trainer).run())

    def run(self, opened: Event) -> None:
        """Run to the end. Ctrl-C closes the log as interrupted and is raised again.

        The `closed` event says why the run ended: drained, paused or stalled (with rollouts that did not end), or out-of-service.
        """
        self._journal.write([opened])
        try:
            self._env.run()
        except KeyboardInterrupt:
            self._close("interrupted")
            raise
        self._close(self._why_ended())

    def _close(self, why: str) -> None:
        self._journal.write([Closed(why=why, count=self._journal.seq, unfired=tuple(self._timeline.unfired()))])

    def _why_ended(self) -> str:
        state = self._engine.model.state()
        if state.out_of_service:
            return "out-of-service"
        if not (self._clients.unfinished or state.running or state.waiting or state.blocked):
            return "drained"
        return "paused" if state.pause_mode is not None else "stalled"
