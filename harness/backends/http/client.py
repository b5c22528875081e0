"""Plain HTTP to a server: each call is answered, refused, or given up within a bound."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, NoReturn

import httpx

from harness.backends import BackendError

END_OF_STREAM = "[DONE]"


class Unreachable(BackendError):
    """Nobody answers at that address, or whoever did hung up."""


class NoAnswer(Exception):
    """A call that was not answered within its bound."""


class BrokenProtocol(Exception):
    """The server answered something that has no meaning in its dialect."""


class Reply(NamedTuple):
    """What a server answered."""

    call: str
    """Method and path, for messages."""
    status: int
    body: Any
    """The JSON value; the text, if it was none."""

    @property
    def ok(self) -> bool:
        return 200 <= self.status < 300

    def get(self, name: str) -> Any:
        """A field of the body; None if there is no such field."""
        return self.body.get(name) if isinstance(self.body, dict) else None

    @property
    def reason(self) -> str:
        """What an error says of itself, on one line, wherever this server's framework puts it."""
        said = self.body
        for place in ("error", "detail", "message"):
            if isinstance(said, dict) and place in said:
                said = said[place]
        text = said if isinstance(said, str) else json.dumps(said)
        return " ".join(text.split())[:300] or "no reason given"

    def __str__(self) -> str:
        return f"{self.call}: {self.status}, {self.reason}"


class Refused(Exception):
    """A stream that did not begin: the server answered with an error."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(str(reply))
        self.reply = reply


class Client:
    """One server, and the connections to it. For use in one event loop.

    Args:
        url: as in http://127.0.0.1:8000; a path in it is kept in front of every call's.
        key: sent as `Authorization: Bearer KEY`.
        timeout_s: how long a call may take, and the first event of a stream's head; how long a stream lasts is its reader's business.

    Raises:
        BackendError: the URL is none that HTTP can be spoken to.
    """

    def __init__(self, url: str, *, key: str | None = None, timeout_s: float = 10.0) -> None:
        self.url = url.rstrip("/")
        self.timeout_s = timeout_s
        try:
            parsed = httpx.URL(self.url)
        except (httpx.InvalidURL, TypeError) as error:
            raise BackendError(f"{url!r} is no URL: {error}; expected one like http://127.0.0.1:8000") from None
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise BackendError(f"got {url!r}, expected a URL like http://127.0.0.1:8000")
        self._http = httpx.AsyncClient(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else None,
            timeout=timeout_s,
            # A paused server answers no request before it is resumed: a bound on connections would be one on requests.
            # No call on a used connection: uvicorn closes those of calls that raised, after the answer, and a call would meet a closed one.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    async def get(self, path: str, **query: Any) -> Reply:
        """Raises: Unreachable, NoAnswer."""
        return await self.send("GET", path, query=query)

    async def post(self, path: str, body: Any = None, *, bounded: bool = True, **query: Any) -> Reply:
        """A call that may rightly take as long as requests run is not `bounded`. Raises: Unreachable, NoAnswer."""
        return await self.send("POST", path, query=query, body=body, bounded=bounded)

    async def send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Any = None,
        text: str | None = None,
        bounded: bool = True,
    ) -> Reply:
        """One call, with a body of JSON, or of `text` as it stands. Raises: Unreachable, NoAnswer."""
        call = f"{method} {path}"
        content = text if text is not None else None if body is None else json.dumps(body)
        headers = None if content is None else {"Content-Type": "application/json"}
        try:
            response = await self._http.request(
                method, path, params=_flags(query), content=content, headers=headers, timeout=self._timeout(bounded=bounded)
            )
        except httpx.TimeoutException:
            raise NoAnswer(f"{call}: no answer within {self.timeout_s:g} s") from None
        except httpx.TransportError as error:
            self._gone(error)
        return _reply(call, response.status_code, response.text)

    @asynccontextmanager
    async def stream(self, path: str, body: Any, *, headers: Mapping[str, str] | None = None) -> AsyncIterator[AsyncIterator[Any]]:
        """POST, then the JSON values of the server-sent events that come. Leaving the block early hangs up.

        Raises:
            Refused: the server answered with an error instead of a stream.
            Unreachable: it is gone, or broke the stream off.
            BrokenProtocol: an event is no JSON.
        """
        # How long until the first event is what a pause decides.
        timeout = self._timeout(bounded=False)
        try:
            async with self._http.stream("POST", path, json=body, headers=headers, timeout=timeout) as response:
                if not response.is_success:
                    await response.aread()
                    raise Refused(_reply(f"POST {path}", response.status_code, response.text))
                yield _events(response)
        except httpx.TransportError as error:
            self._gone(error)

    async def close(self) -> None:
        await self._http.aclose()

    def _timeout(self, *, bounded: bool) -> httpx.Timeout:
        """Connecting is always bounded."""
        return httpx.Timeout(self.timeout_s if bounded else None, connect=self.timeout_s)

    def _gone(self, error: httpx.TransportError) -> NoReturn:
        what = "did not accept a connection in time" if isinstance(error, httpx.TimeoutException) else str(error) or type(error).__name__
        raise Unreachable(f"cannot reach {self.url}: {what}; is the server up, and is this its address?") from error


def _flags(query: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Query parameters as servers spell them: true and false."""
    if not query:
        return None
    return {name: str(value).lower() if isinstance(value, bool) else value for name, value in query.items()}


def _reply(call: str, status: int, text: str) -> Reply:
    try:
        return Reply(call, status, json.loads(text))
    except ValueError:
        return Reply(call, status, text)


async def _events(response: httpx.Response) -> AsyncIterator[Any]:
    """The data of server-sent events, up to the end mark; these servers put each on one line."""
    async for line in response.aiter_lines():
        name, colon, data = line.partition(":")
        if name != "data" or not colon:
            continue
        if (data := data.strip()) == END_OF_STREAM:
            return
        try:
            yield json.loads(data)
        except ValueError:
            raise BrokenProtocol(f"expected JSON in an event of the stream, got {data[:200]!r}") from None
