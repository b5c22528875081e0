"""Records our own engine from inside its loop: the observer's calls as transactions of a rank's log.

Where a call carries a note, that is the operation as its caller thinks of it: a scenario's weight source for instance,
which no engine knows, what is to fail, and what tensors hold that are being sent, so that `committed` tells what was lost
on their way. Without a note, as from anybody's client, the call's own arguments are recorded, and afterwards how it was refused.
Such a client's engine must be the same with a recorder and without: `GuardedRecorder` is for it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from engine import EngineCore, EngineCoreOutput, EngineError, Observer, UpdateFailed
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
        super().__init__(called=handle)
        self._folder = Path(folder)
        self._opened = msgspec.json.decode(opened, type=Opened)
        self._began_ns: int | None = None
        """When the first of what is not written yet was told by which clients may hear of it."""
        self._recorded: set[int] = set()
        """Calls that are operations and have not returned."""
        self._calls = Calls()
        self._without_note: dict[int, tuple[str, Data | None]] = {}
        """Those of them that came without a note: verb and operation; None: a log has no words for it."""
        self._told_to_fail = ExitStack()
        self._all_noted = True
        """Each operation so far came with a note, so that it is known what was sent."""

    def attached(self, core: EngineCore) -> None:
        core.weight_target = self._target = FailingTarget(core.runner.model)
        self._audit = WeightAudit(core, Path(core.config.checkpoint))
        self._log = RankLog(self._folder, replace(self._opened, eos_token_ids=core.eos_token_ids))

    @property
    def recording(self) -> bool:
        return self._log.recording

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
            self._take_up(call, data := {verb: noted[verb]})
            self._prepare(from_data(data), noted.get(SENT, {}))
            return
        self._all_noted = False
        data = self._calls.operation(verb, arguments)
        self._without_note[call] = verb, data
        if data is not None:
            self._take_up(call, data)

    def _take_up(self, call: int, data: Data) -> None:
        ((verb, fields),) = data.items()
        if verb in SENDING:
            self.part, self.of = fields.get("part", 1), fields.get("of", 1)
        self._events += [Called(op=call, operation=data, by="client"), Received(op=call)]

    def _prepare(self, operation: Operation, sent: Mapping[str, str]) -> None:
        match operation:
            case StartWeightUpdate(fails=fails):
                self._audit.begin()
                self._told_to_fail.enter_context(self._target.failing("begin" if fails else None))
            case UpdateWeights():
                self._audit.expect(sent)
            case SwapWeights():
                self._audit.begin()
                self._audit.expect(sent)
            case FinishWeightUpdate(fails=True):
                self._told_to_fail.enter_context(self._target.failing("commit"))
            case _:
                pass

    def part_received(self, *, tensors: int, num_bytes: int) -> None:
        super().part_received(tensors=tensors, num_bytes=num_bytes)
        if self._all_noted:
            self._audit.accept()

    def committed(self, version: str) -> None:
        super().committed(version)
        self._calls.session_ended()
        if self._all_noted:
            *before, committed = self._events
            assert isinstance(committed, Committed), committed
            self._events = [*before, self._audit.audited(committed)]

    def delivered(self, outputs: Sequence[EngineCoreOutput]) -> None:
        self._begin()
        told = (Output(handle(output.request_id), output.first, output.token_ids, output.finish_reason) for output in outputs)
        self._events.append(Delivered(outputs=tuple(told)))

    def returned(self, call: int, answer: Mapping[str, Any] | None, error: EngineError | None) -> None:
        self._told_to_fail.close()
        if call not in self._recorded:
            return
        self._recorded.discard(call)
        if call in self._without_note and not self._tell_again(call, error):
            return
        failure = None if error is None else Failure(error.code, str(error))  # type: ignore[arg-type]
        self._events.append(Returned(op=call, answer=None if answer is None else dict(answer), error=failure))

    def _tell_again(self, call: int, error: EngineError | None) -> bool:
        """A call without a note, now that it is known what became of it; returns whether it is told."""
        verb, data = self._without_note.pop(call)
        if data is not None and error is not None:
            data = self._calls.refused(data, error)
        if data is None:
            if error is None or (isinstance(error, UpdateFailed) and error.wrote):
                self.give_up(f"a log has no words for this call of {verb}")
            self._events.clear()  # it was refused at once and changed nothing: all that was told since the boundary is of it
            return False
        if error is None:
            self._calls.taken(data)
            return True
        for place, event in enumerate(self._events):
            if isinstance(event, Called) and event.op == call:
                self._events[place] = replace(event, operation=data)
        return True

    def give_up(self, why: str) -> None:
        """Record nothing any more: the log was interrupted, and the engine goes on."""
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
            self._log.append(self._began_ns or time.monotonic_ns(), _in_order(events))
        self._began_ns = None

    def update_failed(self, phase: Literal["start", "update", "finish"], *, wrote: bool, why: str) -> None:
        super().update_failed(phase, wrote=wrote, why=why)
        if wrote:
            self._calls.session_ended()

    def _begin(self) -> None:
        if self._began_ns is None:
            self._began_ns = time.monotonic_ns()


class GuardedRecorder(Observer):
    """Records an engine that serves anybody: whatever goes wrong in a recorder once its log has begun ends the recording, with
    one warning, and nothing else. Where nothing is recorded any more, nothing is done.

    Args and raises: as for `Recorder`.
    """

    def __init__(self, folder: str, opened: str) -> None:
        self._recorder = Recorder(folder, opened)
        self.attached = self._recorder.attached
        for name in vars(Observer).keys() - {"attached"}:
            if not name.startswith("_"):
                setattr(self, name, self._guarded(getattr(self._recorder, name)))

    def _guarded(self, tell: Callable[..., None]) -> Callable[..., None]:
        def told(*args: Any, **kwargs: Any) -> None:
            if self._recorder.recording:
                try:
                    tell(*args, **kwargs)
                except Exception as error:
                    self._recorder.give_up(f"{type(error).__name__}: {error}")

        return told


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
