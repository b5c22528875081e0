"""What the tests of this folder ask a server, and how."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

LONG = {"prompt": [5, 6, 7, 8], "max_tokens": 400, "temperature": 0, "return_token_ids": True}
SHORT = {**LONG, "max_tokens": 3}


def call(client: httpx.Client, path: str, **options: Any) -> dict[str, Any]:
    """POST that must succeed."""
    answer = client.post(path, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def refused(client: httpx.Client, path: str, **options: Any) -> tuple[int, str]:
    """POST that must not; status and the kind of the error."""
    answer = client.post(path, **options)
    error = answer.json()["error"]
    assert error["code"] == answer.status_code
    assert error["message"]
    return answer.status_code, error["type"]


@contextmanager
def streaming(client: httpx.Client, **fields: Any) -> Iterator[Callable[[], list[dict[str, Any]]]]:
    """A streamed request that has begun; what is yielded reads all of its choices."""
    with httpx.stream("POST", f"{client.base_url}/v1/completions", json={**LONG, "stream": True, **fields}, timeout=30) as stream:
        events = (json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line and line != "data: [DONE]")
        first = next(events)
        yield lambda: [choice for event in (first, *events) for choice in event["choices"]]


def raw(path: str, body: str) -> bytes:
    """A POST as bytes, for a client that looks at its socket itself."""
    lines = f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", f"Content-Length: {len(body)}", "", body
    return "\r\n".join(lines).encode()


def metric(client: httpx.Client, name: str) -> float:
    """A sample of `/metrics`, by name and labels; 0 if there is none."""
    found = re.search(rf"^caesura:{re.escape(name)} (.*)$", client.get("/metrics").text, re.M)
    return float(found[1]) if found else 0.0
