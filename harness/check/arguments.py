"""Calls that are wrong: refused with a status of the client's kind, and without an effect."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from harness.backends.http import Reply
from harness.backends.http.contract import ContractDialect
from harness.check.promise import NotCheckable, check, expect
from harness.check.stage import Stage

NO_TOKEN = 2**31 - 1
"""An id that no vocabulary has."""


class Wrong(NamedTuple):
    """A call that no server may take."""

    what: str
    path: str
    query: dict[str, Any] | None = None
    body: Any = None
    text: str | None = None
    """A body that is not even JSON."""


CONTROL = {
    "bad-mode": Wrong("an unknown pause mode", "/pause", query={"mode": "nonsense"}),
    "bad-clear": Wrong("a clear_cache that is neither true nor false", "/pause", query={"clear_cache": "maybe"}),
    "bad-json": Wrong("a body that is no JSON", "/abort_requests", text="["),
    "bad-abort": Wrong("request_ids that is no list", "/abort_requests", body={"request_ids": 5}),
    "bad-version": Wrong("a version that is no string", "/update_weight_version", body={"new_version": 5}),
    "no-version": Wrong("a version that is missing", "/update_weight_version", body={}),
    "bad-update": Wrong("an update_info that is missing", "/update_weights", body={}),
}
"""Control calls, in the paths of vLLM's RL server."""

SGLANG_CONTROL = {
    "bad-mode": Wrong("an unknown pause mode", "/pause_generation", body={"mode": "nonsense"}),
    "bad-json": Wrong("a body that is no JSON", "/abort_request", text="["),
    "bad-version": Wrong("a version that is no string", "/update_weight_version", body={"new_version": 5, "abort_all_requests": False}),
    "no-version": Wrong("a version that is missing", "/update_weight_version", body={"abort_all_requests": False}),
}


def _register_control(id: str, what: str) -> None:
    @check(id, f"{what} is refused (4xx), and changes nothing")
    async def judge(stage: Stage) -> str:
        table = CONTROL if isinstance(stage.dialect, ContractDialect) else SGLANG_CONTROL
        if (wrong := table.get(id)) is None:
            raise NotCheckable("this server has no such argument")
        if wrong.path in stage.dialect.optional_paths and not stage.dialect.has(wrong.path):
            raise NotCheckable(f"the server has no {wrong.path}")
        before = await stage.is_paused(), await stage.dialect.weight_version()
        reply = await stage.client.send("POST", wrong.path, query=wrong.query, body=wrong.body, text=wrong.text)
        after = await stage.is_paused(), await stage.dialect.weight_version()
        evidence = _expect_clients_fault(reply)
        expect(after == before, f"{reply}, and yet paused and version went from {before} to {after}")
        return evidence


for _id, _wrong in CONTROL.items():
    _register_control(_id, _wrong.what)


def _register_request(id: str, what: str, wrong: Callable[[int], tuple[list[int], int]]) -> None:
    """`wrong` makes a prompt and a max_tokens, given the longest sequence that the model takes."""

    @check(id, f"a request with {what} is refused (4xx)")
    async def judge(stage: Stage) -> str:
        card = stage.dialect.card
        prompt, max_tokens = wrong(card.max_model_len)
        if isinstance(stage.dialect, ContractDialect):
            return _expect_clients_fault(
                await stage.client.post("/v1/completions", {"model": card.model, "prompt": prompt, "max_tokens": max_tokens})
            )
        sampling = {"max_new_tokens": max_tokens}
        return _expect_clients_fault(await stage.client.post("/generate", {"input_ids": prompt, "sampling_params": sampling}))


_register_request("empty-prompt", "an empty prompt", lambda longest: ([], 1))
_register_request("long-prompt", "a prompt beyond the model's length", lambda longest: ([16] * (longest + 1), 1))
_register_request("unknown-token", "a token that the vocabulary does not have", lambda longest: ([NO_TOKEN], 1))
_register_request("no-tokens", "max_tokens=0", lambda longest: ([16, 17], 0))


def _expect_clients_fault(reply: Reply) -> str:
    expect(not reply.ok, f"{reply.status}: it was taken")
    expect(400 <= reply.status < 500, f"{reply}; expected a status of 400 to 499, as the fault is the client's")
    return str(reply)
