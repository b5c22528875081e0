"""Who answers at a URL: which dialect, which model, which of the optional paths. Nothing that is asked here changes anything."""

from __future__ import annotations

from harness.backends import BackendError
from harness.backends.http.client import Client, NoAnswer, Reply
from harness.backends.http.contract import CaesuraDialect, VllmDialect
from harness.backends.http.dialect import Card, Dialect
from harness.backends.http.sglang import SglangDialect

DEFAULT_MODEL_LEN = 512
"""Taken for granted where a server does not say how long a sequence may be."""


async def probe(client: Client) -> Dialect:
    """The dialect of the server, its control plane found to be there.

    Raises:
        BackendError: unreachable, slow, wants a key, is no server of a known kind, or has no control plane; the message says what to do.
    """
    try:
        models = await client.get("/v1/models")
        _check_key(models)
        kind = await _kind(client, models)
        card = await _card(client, models, kind)
        dialect = kind(client, card)
        await _check_control_plane(dialect)
        await dialect.learn()
    except NoAnswer as error:
        raise BackendError(f"{client.url} is there but slow: {error}; ask again with a longer --timeout") from None
    return dialect


def _check_key(reply: Reply) -> None:
    if reply.status in (401, 403):
        raise BackendError(f"the server wants a key ({reply}): give it with --key, or in CAESURA_API_KEY")


async def _kind(client: Client, models: Reply) -> type[Dialect]:
    """By whom /v1/models says that it is owned, else by a path that only one of them has."""
    owner = _first_model(models).get("owned_by")
    if owner in (kinds := {"vllm": VllmDialect, "caesura": CaesuraDialect, "sglang": SglangDialect}):
        return kinds[owner]
    if (await client.get("/model_info")).ok:
        return SglangDialect
    if (await client.get("/is_paused")).ok:
        return CaesuraDialect
    raise BackendError(
        f"{client.url} is no inference server with a control plane that is known here: /v1/models answered {models.status}, "
        "and neither /is_paused (vLLM, caesura serve) nor /model_info (SGLang) is there"
    )


async def _card(client: Client, models: Reply, kind: type[Dialect]) -> Card:
    model = _first_model(models)
    version = await client.get("/version")
    text = version.get("version") if version.ok else None
    paths = [path for path in kind.optional_paths if await _exists(client, path)]
    return Card(
        model=str(model.get("id", "")),
        root=str(model.get("root") or model.get("id") or ""),
        max_model_len=int(model.get("max_model_len") or DEFAULT_MODEL_LEN),
        versions={kind.name: str(text)} if text else {},
        paths=frozenset(paths),
    )


async def _exists(client: Client, path: str) -> bool:
    """OPTIONS runs nothing, whatever is there: 405 where it is not answered, 404 where there is no such path."""
    return (await client.send("OPTIONS", path)).status != 404


async def _check_control_plane(dialect: Dialect) -> None:
    path = "/pause_generation" if dialect.name == "sglang" else "/is_paused"
    reply = await dialect.client.send("OPTIONS" if dialect.name == "sglang" else "GET", path)
    _check_key(reply)
    if reply.status == 404:
        raise BackendError(f"{dialect.client.url} ({dialect.name}) has no control plane: {path} is 404; {dialect.switch}")


def _first_model(models: Reply) -> dict:
    listed = models.get("data")
    return listed[0] if models.ok and isinstance(listed, list) and listed and isinstance(listed[0], dict) else {}
