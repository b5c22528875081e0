"""Servers at a URL: an HTTP client, the dialects that it speaks, and the backend that they make.

Needs httpx, which the extra `check` brings; nothing of a server's own libraries.
"""

from harness.backends.http.backend import HttpBackend
from harness.backends.http.client import BrokenProtocol, Client, NoAnswer, Reply, Unreachable
from harness.backends.http.dialect import Dialect

__all__ = ["BrokenProtocol", "Client", "Dialect", "HttpBackend", "NoAnswer", "Reply", "Unreachable"]
