"""The engine over HTTP: OpenAI's completions, and the control plane that reinforcement learning needs. It comes with the extra `server`."""

from __future__ import annotations

from .app import make_app
from .config import ServerConfig
from .run import Server, serve

__all__ = ["Server", "ServerConfig", "make_app", "serve"]
