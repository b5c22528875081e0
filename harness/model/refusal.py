"""How the model says no."""

from __future__ import annotations

from harness.events import ErrorCode, Failure


class Refused(Exception):
    """An operation that changes nothing but to return this error. Never leaves the model."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.failure = Failure(code, message)
