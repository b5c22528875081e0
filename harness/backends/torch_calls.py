"""Our engine's own calls as operations of a log, where no note tells how their caller thinks of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from engine import Conflict, EngineError, InvalidArgument, UpdateFailed
from harness.live.handle import handle
from harness.operations import OPERATIONS, from_data

SUBMITTED = ("max_tokens", "cache_salt", "ignore_eos", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs")
"""Fields of sampling parameters that are fields of `submit`, too."""

SENDING = ("update_weights", "swap_weights")
"""What sends weights."""

Data = dict[str, Any]


class Calls:
    """Tells calls, and remembers of the weight session what an operation must agree with."""

    def __init__(self) -> None:
        self._sizes: set[int | None] = set()
        """Of how many parts the calls that the session took said that it is; None: a call did not count."""

    def session_ended(self) -> None:
        self._sizes.clear()

    def taken(self, data: Data) -> None:
        """The engine did what this operation asks for."""
        if (update := data.get("update_weights")) is not None:
            self._sizes.add(update.get("of"))

    def operation(self, verb: str, arguments: Mapping[str, Any]) -> Data | None:
        """The operation as `operations.to_data` gives it; None: a log has no words for this call."""
        if verb == "update_weights":
            sizes = self._sizes | {arguments["of"]}
            if None in sizes and sizes - {None, 1}:
                return None
        data = {verb: _fields(verb, arguments)}
        try:
            from_data(data)
        except ValidationError:
            return None
        return data

    def refused(self, data: Data, error: EngineError) -> Data | None:
        """The operation, now that it is known how it was refused; None: better not told.

        What a log cannot tell is why arguments are wrong (a folder that is not there, a token that the vocabulary has not), what
        was wrong with tensors of which none was written, and which are missing when an engine that is out of service will not
        finish an update. Nothing changed by such calls.
        """
        ((verb, fields),) = data.items()
        match error:
            case InvalidArgument():
                return None
            case Conflict() if verb == "finish_weight_update" and self._sizes:
                return None
            case UpdateFailed(wrote=False) if verb in SENDING:
                return None
            case UpdateFailed():
                return {verb: {**fields, "fails": True}}
        return data


def _fields(verb: str, arguments: Mapping[str, Any]) -> Data:
    match verb:
        case "submit":
            params = {name: getattr(arguments["params"], name) for name in SUBMITTED}
            defaults = {name: field.default for name, field in OPERATIONS["submit"].model_fields.items()}
            chosen = {name: value for name, value in params.items() if value != defaults[name]}
            return {"id": handle(arguments["request_id"]), "prompt": {"tokens": list(arguments["prompt_token_ids"])}, **chosen}
        case "abort":
            ids = arguments["request_ids"]
            return {"ids": "all" if ids is None else list(map(handle, ids))}
        case "update_weights" | "swap_weights":
            source = {"checkpoint": arguments["folder"] or "tensors from memory"}
            return {"source": source, **{name: arguments[name] for name in ("part", "of", "version") if arguments.get(name) is not None}}
        case _:
            return {name: list(value) if isinstance(value, tuple) else value for name, value in arguments.items() if value is not None}
