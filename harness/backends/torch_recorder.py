"""Records our own engine from inside its loop: the observer's calls as transactions of a rank's log.

Where a call carries a note, that is the operation as its caller thinks of it: a scenario's weight source for instance,
which no engine knows, what is to fail, and what tensors hold that are being sent, so that `committed` tells what was lost
on their way. Without a note, as from anybody's client, the call's own arguments are recorded, and afterwards how it was refused.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from engine import EngineCore, EngineCoreOutput, EngineError
from harness.backends.torch import Transitions
from harness.backends.torch_calls import SENDING, Calls, Data
from harness.backends.torch_weights import FailingTarget, WeightAudit
from harness.events import Asleep, Called, Committed, Delivered, Event, Failure, Opened, Output, Received, Returned
from harness.live import RankLog
from harness.live.handle import handle
from harness.operations import (
    OPERATIONS,
    FinishWeightUpdate,
    Operation,
    StartWeightUpdate,
    SwapWeights,
    UpdateWeights,
    from_data,
)

_logger = logging.getLogger(__name__)

CLOSE = "close"
"""A note whose one key is this ends the log; it goes with a call that changes nothing."""

SENT = "sent"
"""Beside the operation, a note has under this key the contents of each tensor that goes with it, as its sender knows them."""

MOST_NAMES = 65_536
"""So many requests are remembered whose ids a log cannot have: a step in flight may still name one that has ended."""

VERBS = {"load_weights": "swap_weights"}
"""What the engine calls otherwise than operations are called."""


class Recorder(Transitions):
    """Writes `events.r0.jsonl`, as far as it can be written, and as far as a log has words for what happens.

    Args:
        folder: where.
        opened: the first event as JSON; what only the engine knows is filled in.

    Raises:
        LogError: the folder cannot be written, or holds such a log.
    """

    def __init__(self, folder: str, opened: str) -> None:
        super().__init__()
        self._folder = Path(folder)
        self._opened = msgspec.json.decode(opened, type=Opened)
        self._began_ns: int | None = None
        """When the first of what is not written yet was told by which clients may hear of it."""
        self._recorded: set[int] = set()
        """Calls that are operations and have not returned."""
        self._calls = Calls()
        self._without_note: dict[int, tuple[str, Data | None]] = {}
        """Those of them that came without a note: verb and operation; None: a log has no words for it."""
        self._names: dict[str, str] = {}
        """What requests are called in the log, if it cannot have their ids."""
        self._told_to_fail = ExitStack()
        self._sources_known = True
        """Notes told of all weights that were ever sent."""

    def attached(self, core: EngineCore) -> None:
        core.weight_target = self._target = FailingTarget(core.runner.model)
        self._audit = WeightAudit(core, Path(core.config.checkpoint))
        self._log = RankLog(self._folder, replace(self._opened, eos_token_ids=core.eos_token_ids))

    def called(self, call: int, verb: str, arguments: Mapping[str, Any], *, note: str) -> None:
        self._begin()
        noted = json.loads(note) if note else {}
        if CLOSE in noted:
            self._log.close(noted[CLOSE])
            return
        verb = VERBS.get(verb, verb)
        if verb not in OPERATIONS:
            return  # It only reads.
        self._recorded.add(call)
        if verb in noted:
            data = {verb: noted[verb]}
        else:
            data = self._calls.operation(verb, arguments)
            self._without_note[call] = verb, data
            self._sources_known = self._sources_known and verb not in SENDING
        if data is not None:
            self._events += [Called(op=call, operation=data, by="client"), Received(op=call)]
            self._prepare(from_data(data), noted.get(SENT, {}))

    def _prepare(self, operation: Operation, sent: Mapping[str, str]) -> None:
        match operation:
            case StartWeightUpdate(fails=fails):
                self._audit.begin()
                self._told_to_fail.enter_context(self._target.failing("begin" if fails else None))
            case UpdateWeights(part=part, of=of):
                self.part, self.of = part, of
                self._audit.expect(sent)
            case SwapWeights():
                self.part = self.of = 1
                self._audit.begin()
                self._audit.expect(sent)
            case FinishWeightUpdate(fails=True):
                self._told_to_fail.enter_context(self._target.failing("commit"))
            case _:
                pass

    def part_received(self, *, tensors: int, num_bytes: int) -> None:
        super().part_received(tensors=tensors, num_bytes=num_bytes)
        if self._sources_known:
            self._audit.accept()

    def committed(self, version: str) -> None:
        super().committed(version)
        if self._sources_known:
            *before, committed = self._events
            assert isinstance(committed, Committed), committed
            self._events = [*before, self._audit.audited(committed)]

    def delivered(self, outputs: Sequence[EngineCoreOutput]) -> None:
        self._begin()
        told = tuple(Output(output.request_id, output.first, output.token_ids, output.finish_reason) for output in outputs)
        self._events.append(Delivered(outputs=told))

    def returned(self, call: int, answer: Mapping[str, Any] | None, error: EngineError | None) -> None:
        self._told_to_fail.close()
        if call not in self._recorded:
            return
        self._recorded.discard(call)
        if call in self._without_note:
            verb, data = self._without_note.pop(call)
            if error is not None:
                data = data and self._calls.refused(data, error)
            elif data is None:
                self._give_up(f"a log has no words for this call of {verb}")
            self._tell_again(call, data)
            if data is None:
                return
        failure = None if error is None else Failure(error.code, str(error))  # type: ignore[arg-type]
        self._events.append(Returned(op=call, answer=None if answer is None else dict(answer), error=failure))

    def _tell_again(self, call: int, data: Data | None) -> None:
        """The call as `data` has it, or (None) not at all, unless it was written when it was taken up."""
        taken_up = [event for event in self._events if isinstance(event, Called | Received) and event.op == call]
        rest = [event for event in self._events if event not in taken_up]
        if taken_up and data is not None:
            called, received = taken_up
            rest = [replace(called, operation=data), received, *rest]
        self._events = rest

    def _give_up(self, why: str) -> None:
        if self._log.recording:
            _logger.warning("recording stops, the engine goes on: %s", why)
        self._events.clear()
        self._log.close("interrupted")

    def step_failed(self, step: int, *, why: str) -> None:
        """No boundary follows: the loop ends here, and so does the log."""
        super().step_failed(step, why=why)
        self.boundary()
        self._log.close("failed")

    def stopped(self, why: str, *, broke: bool) -> None:
        self._log.close("crashed" if broke else "drained", why if broke else "")

    def boundary(self) -> None:
        if events := self.take():
            self._log.append(
                self._began_ns or time.monotonic_ns(),
                _in_order([_renamed(event, self._names) for event in events] if self._names else events),
            )
        self._began_ns = None

    def accepted(self, request_id: str, *, parked: bool) -> None:
        super().accepted(request_id, parked=parked)
        self._name(request_id)

    def blocked(self, request_id: str) -> None:
        super().blocked(request_id)
        self._name(request_id)

    def update_started(self) -> None:
        super().update_started()
        self._calls.session_opened()

    def _name(self, request_id: str) -> None:
        if (name := handle(request_id)) != request_id:
            self._names[request_id] = name
            if len(self._names) > MOST_NAMES:
                del self._names[next(iter(self._names))]

    def _begin(self) -> None:
        if self._began_ns is None:
            self._began_ns = time.monotonic_ns()


def _renamed(value: Any, names: Mapping[str, str]) -> Any:
    match value:
        case str():
            return names.get(value, value)
        case msgspec.Struct():
            return replace(value, **{name: _renamed(getattr(value, name), names) for name in value.__struct_fields__})
        case tuple():
            items = [_renamed(item, names) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return value


def _in_order(events: list[Event]) -> list[Event]:
    """As docs/semantics.md orders a transaction: superseded calls return before anything else happens, and pause calls before
    the engine falls asleep. The loop answers each group of calls when it comes round to it."""
    superseded = [event for event in events if isinstance(event, Returned) and event.error is not None and event.error.code == "superseded"]
    ordered = [event for event in events if event not in superseded]
    place = 2 if ordered and isinstance(ordered[0], Called) else 0
    ordered[place:place] = superseded
    asleep = next((place for place, event in enumerate(ordered) if isinstance(event, Asleep)), None)
    if asleep is not None:
        paused = [event for event in ordered[asleep:] if isinstance(event, Returned) and event.answer == {"status": "paused"}]
        rest = [event for event in ordered[asleep:] if event not in paused]
        ordered[asleep:] = [*paused, *rest]
    return ordered
