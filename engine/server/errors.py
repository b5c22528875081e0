"""What goes wrong as an answer: a status code, and a body in the shape that OpenAI's clients read."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from ..errors import EngineError

STATUS = {
    "invalid": HTTPStatus.BAD_REQUEST,
    "failed": HTTPStatus.BAD_REQUEST,
    "conflict": HTTPStatus.CONFLICT,
    "busy": HTTPStatus.CONFLICT,
    "superseded": HTTPStatus.CONFLICT,
    "out-of-service": HTTPStatus.CONFLICT,
    "rejected": HTTPStatus.SERVICE_UNAVAILABLE,
    "dead": HTTPStatus.SERVICE_UNAVAILABLE,
}
"""By `EngineError.code`. A failed weight update is the sender's: its source is not there, or does not fit."""

KINDS = {401: "unauthorized", 404: "not-found", 405: "method-not-allowed", 413: "too-large"}
"""What the server itself refuses, by status; whatever else it does is `invalid`."""

RETRY_AFTER_S = 1
"""When a request that was rejected under a pause may be tried again; nobody knows how long the pause lasts."""


class ErrorInfo(BaseModel):
    message: str
    """What was got, what was expected, what to do."""
    type: str
    """The engine's code for it, as `conflict`; docs/server.md lists them."""
    param: str | None = None
    """The field that is wrong, if one is."""
    code: int
    """The status code."""


class ErrorResponse(BaseModel):
    error: ErrorInfo


def error_body(error: EngineError) -> ErrorResponse:
    """An error of the engine, as a body or as an event of a stream."""
    return ErrorResponse(error=ErrorInfo(message=str(error), type=error.code, code=STATUS[error.code]))


def install_error_handlers(app: FastAPI) -> None:
    app.add_exception_handler(EngineError, _engine_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)


async def _engine_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, EngineError)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if error.code == "rejected" else None
    return JSONResponse(error_body(error).model_dump(), STATUS[error.code], headers)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    place = _place(first["loc"])
    if isinstance(first.get("input"), bytes):
        first = {**first, "msg": "expected JSON, and the header 'Content-Type: application/json'"}
    return error_answer(f"{place}: {first['msg']}{_got(first)}", "invalid", HTTPStatus.BAD_REQUEST, param=place)


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    kind = KINDS.get(error.status_code, "invalid")
    return error_answer(str(error.detail), kind, error.status_code, headers=dict(error.headers or {}))


def error_answer(message: str, kind: str, status: int, *, param: str | None = None, headers: dict[str, str] | None = None) -> JSONResponse:
    """An error that is not the engine's own; `kind` is what `error.type` says."""
    info = ErrorInfo(message=message, type=kind, param=param, code=status)
    return JSONResponse(ErrorResponse(error=info).model_dump(), status, headers)


def _place(location: Sequence[str | int]) -> str:
    """`('query', 'mode')` as `mode`, `('body', 'prompt', 'str')` as `prompt.str`; a body that is not even JSON is `body`."""
    source, *fields = map(str, location)
    return ".".join(fields) if fields and not fields[0].isdecimal() else source


def _got(problem: Any) -> str:
    """What was sent, unless it is long or was not sent at all."""
    if problem["type"] in ("missing", "json_invalid"):
        return ""
    got = ascii(problem["input"])
    return f", got {got}" if len(got) <= 80 else f", got {got[:77]}..."
