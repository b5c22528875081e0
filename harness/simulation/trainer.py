"""A trainer: it trains beside generation, then pauses the engine, sends new weights, and resumes."""

from __future__ import annotations

from harness.events import Returned
from harness.operations import FinishWeightUpdate, Operation, Pause, Perturbation, Resume, StartWeightUpdate, UpdateWeights, WeightSource
from harness.scenario import Trainer
from harness.simulation.engine import VirtualEngine
from harness.simulation.environment import Environment, Process
from harness.simulation.ledger import TRAINER, Ledger


class TrainerProcess:
    """Trains for ever; once no batch and no step comes any more, it waits and nothing is left to happen."""

    def __init__(self, env: Environment, engine: VirtualEngine, ledger: Ledger, settings: Trainer) -> None:
        self._env = env
        self._engine = engine
        self._ledger = ledger
        self._settings = settings

    def run(self) -> Process:
        """The process."""
        while True:
            if self._settings.every_steps is not None:
                yield from self._await_steps(self._settings.every_steps)
            else:
                yield from self._await_batch()
            yield self._env.timeout(round(self._settings.train_ms * 1e6))
            yield from self._update(self._ledger.version + 1)

    def _await_steps(self, count: int) -> Process:
        last = self._engine.steps + count
        while self._engine.steps < last:
            yield self._engine.launched.wait()

    def _await_batch(self) -> Process:
        while self._ledger.take() is None:
            yield self._engine.ended.wait()

    def _update(self, number: int) -> Process:
        source = WeightSource(perturb=Perturbation(seed=number, scale=0.01))
        parts, transfer_ns = self._settings.parts, round(self._settings.transfer_ms * 1e6)
        yield from self._ask(Pause(mode=self._settings.mode, clear_cache=self._settings.clear_cache))
        yield from self._ask(StartWeightUpdate())
        for part in range(1, parts + 1):
            yield self._env.timeout(transfer_ns * part // parts - transfer_ns * (part - 1) // parts)
            yield from self._ask(UpdateWeights(source=source, part=part, of=parts))
        yield from self._ask(FinishWeightUpdate(version=f"v{number}"))
        yield from self._ask(Resume())

    def _ask(self, operation: Operation) -> Process:
        returned: Returned = yield self._engine.call(operation, TRAINER)
        if returned.error is not None:
            raise RuntimeError(f"the trainer's {operation.verb} was refused: {returned.error.message}")
