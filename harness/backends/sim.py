"""The model as an engine: symbolic tokens, no weights, no libraries."""

from __future__ import annotations

from harness.backends import EngineInfo
from harness.events import Event
from harness.model import CAESURA, EngineModel
from harness.model.symbolic import symbolic_token
from harness.operations import Operation
from harness.scenario import EngineShape
from harness.state import EngineState
from harness.tokenizer import bytes_of


class SimBackend:
    """The default profile of the model; a text prompt is its UTF-8 bytes."""

    name = "sim"
    level = 2

    def __init__(self, *, seed: int = 0) -> None:
        self._seed = seed

    def start(self, shape: EngineShape) -> EngineInfo:
        self._model = EngineModel(shape, profile=CAESURA)
        return EngineInfo(versions={}, device="none", profile=CAESURA.name, eos_token_ids=())

    def tokenize(self, text: str) -> tuple[int, ...]:
        return bytes_of(text)

    def apply(self, op: int, operation: Operation) -> list[Event]:
        return self._model.apply(op, operation)

    def has_work(self) -> bool:
        return self._model.has_work()

    def step(self) -> list[Event]:
        if self._model.look_due:
            return self._model.look()
        events = self._model.schedule() if self._model.launch_due else []
        if self._model.landing_due:
            epoch = self._model.landing_epoch
            events += self._model.land(lambda request, position: symbolic_token(request, position, epoch, self._seed))
        return events

    def state(self) -> EngineState:
        return self._model.state()

    def stop(self) -> None:
        pass
