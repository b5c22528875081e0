"""Who may use a route, and how much may be sent."""

from __future__ import annotations

from hmac import compare_digest
from http import HTTPStatus
from typing import Annotated

from fastapi import Depends
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .dependencies import Config

bearer = HTTPBearer(auto_error=False, description="The server's API key.")


def require_api_key(config: Config, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(bearer)]) -> None:
    """For routes of a server that has a key. Raises: HTTPException 401, unless it was sent."""
    assert config.api_key is not None
    if credentials is None or not compare_digest(credentials.credentials.encode(), config.api_key.encode()):
        got = "no key" if credentials is None else "another key"
        raise HTTPException(
            HTTPStatus.UNAUTHORIZED, f"this server wants 'Authorization: Bearer KEY', got {got}", {"WWW-Authenticate": "Bearer"}
        )


class BodyLimit:
    """Refuses a body of more than so many bytes, whether its length is announced or not, without holding more of it."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "0")
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            if announced.isdecimal() and int(announced) > self._max_bytes:
                raise self._too_large(announced)
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._too_large(f"more than {self._max_bytes}")
            return message

        await self._app(scope, receive_limited, send)

    def _too_large(self, got: str) -> HTTPException:
        return HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body has {got} bytes; expected at most {self._max_bytes}")
