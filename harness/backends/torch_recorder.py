"""Records our own engine from inside its loop: the observer's calls as transactions of a rank's log.

Where a call carries a note, that is the operation as its caller thinks of it: a scenario's weight source for instance,
which no engine knows, what is to fail, and what tensors hold that are being sent, so that `committed` tells what was lost
on their way. Without a note the call's own arguments are recorded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from engine import EngineCore, EngineCoreOutput, EngineError
from harness.backends.torch import Transitions
from harness.backends.torch_weights import FailingTarget, WeightAudit
from harness.events import Asleep, Called, Committed, Delivered, Event, Failure, Opened, Output, Received, Returned
from harness.live import RankLog
from harness.operations import (
    OPERATIONS,
    FinishWeightUpdate,
    Operation,
    StartWeightUpdate,
    SwapWeights,
    UpdateWeights,
    from_data,
)

CLOSE = "close"
"""A note whose one key is this ends the log; it goes with a call that changes nothing."""

SENT = "sent"
"""Beside the operation, a note has under this key the contents of each tensor that goes with it, as its sender knows them."""

VERBS = {"load_weights": "swap_weights"}
"""What the engine calls otherwise than operations are called."""

SUBMITTED = ("max_tokens", "cache_salt", "ignore_eos", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs")
"""Fields of sampling parameters that are fields of `submit`, too."""


class Recorder(Transitions):
    """Writes `events.r0.jsonl`.

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
        self._told_to_fail = ExitStack()
        self._sources_known = True
        """Notes told of all weights that were ever sent."""

    def attached(self, core: EngineCore) -> None:
        core.weight_target = self._target = FailingTarget(core.runner.model)
        self._audit = WeightAudit(core, Path(core.config.checkpoint))
        self._log = RankLog(self._folder, msgspec.structs.replace(self._opened, eos_token_ids=core.eos_token_ids))

    def called(self, call: int, verb: str, arguments: Mapping[str, Any], *, note: str) -> None:
        self._begin()
        noted = json.loads(note) if note else {}
        if CLOSE in noted:
            self._log.close(noted[CLOSE])
            return
        verb = VERBS.get(verb, verb)
        if verb not in OPERATIONS:
            return  # It only reads.
        data = {verb: noted[verb]} if verb in noted else {verb: _arguments(verb, arguments)}
        self._recorded.add(call)
        self._events += [Called(op=call, operation=data, by="client"), Received(op=call)]
        if verb in noted:
            self._prepare(from_data(data), noted.get(SENT, {}))
        elif verb in ("update_weights", "swap_weights"):
            self._sources_known = False

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
        failure = None if error is None else Failure(error.code, str(error))  # type: ignore[arg-type]
        self._events.append(Returned(op=call, answer=None if answer is None else dict(answer), error=failure))

    def step_failed(self, step: int, *, why: str) -> None:
        """No boundary follows: the loop ends here, and so does the log."""
        super().step_failed(step, why=why)
        self.boundary()
        self._log.close("failed")

    def boundary(self) -> None:
        if events := self.take():
            self._log.append(self._began_ns or time.monotonic_ns(), _in_order(events))
        self._began_ns = None

    def _begin(self) -> None:
        if self._began_ns is None:
            self._began_ns = time.monotonic_ns()


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


def _arguments(verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of the operation, from those of the engine's own call."""
    match verb:
        case "submit":
            params = {name: getattr(arguments["params"], name) for name in SUBMITTED}
            defaults = {name: field.default for name, field in OPERATIONS["submit"].model_fields.items()}
            chosen = {name: value for name, value in params.items() if value != defaults[name]}
            return {"id": arguments["request_id"], "prompt": {"tokens": list(arguments["prompt_token_ids"])}, **chosen}
        case "abort":
            ids = arguments["request_ids"]
            return {"ids": "all" if ids is None else list(ids)}
        case "update_weights" | "swap_weights":
            source = {"checkpoint": arguments["folder"] or "tensors from memory"}
            return {"source": source, **{name: arguments[name] for name in ("part", "of", "version") if arguments.get(name) is not None}}
        case _:
            return {name: list(value) if isinstance(value, tuple) else value for name, value in arguments.items() if value is not None}
