"""A server from start to end: an engine, uvicorn around its application, and a stop that ends every request properly."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from math import ceil
from pathlib import Path
from socket import AF_INET, AF_INET6, SO_REUSEADDR, SOL_SOCKET, socket

import uvicorn

from ..async_llm import AsyncLLM
from ..config import EngineConfig
from ..connection import ObserverFactory
from ..errors import EngineDeadError
from .app import make_app
from .config import ServerConfig
from .tokenizer import tokenizer_of

logger = logging.getLogger("uvicorn.error")  # which uvicorn sends to stderr

CLOSE_S = 5.0
"""How long connections may take to close once every request has ended."""


class Server(uvicorn.Server):
    """Serves one engine over HTTP, and stops it in the end.

    Told to stop (SIGTERM, Ctrl-C, `should_exit`) it takes no connections any more and lets requests run for `drain_s`; those left
    are aborted, so that their clients get what was generated.
    """

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        app = make_app(llm, tokenizer_of(Path(llm.config.checkpoint)), config)
        timeout_s = ceil(config.drain_s + CLOSE_S)
        super().__init__(uvicorn.Config(app, host=config.host, port=config.port, timeout_graceful_shutdown=timeout_s, lifespan="off"))
        self._llm = llm
        self._name = config.served_model_name
        self._drain_s = config.drain_s

    @property
    def url(self) -> str:
        """Where it listens, once `started`."""
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            logger.info("%s is served at %s (Ctrl-C stops it)", self._name, self.url)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        ending = asyncio.create_task(self._end_requests())
        await super().shutdown(sockets)
        ending.cancel()
        # Here and not after `serve`, which raises the signal again that it was stopped by.
        self._llm.shutdown()

    async def _end_requests(self) -> None:
        with suppress(EngineDeadError):
            if not await self._held_back():
                await asyncio.sleep(self._drain_s)
            await self._llm.abort()

    async def _held_back(self) -> bool:
        """Whether requests wait for a resume or a weight update that nobody can send any more."""
        now = await self._llm.counters()
        return now.out_of_service is not None or (now.pause_mode is not None and not (now.pause_mode == "wait" and now.pause_pending))


def serve(engine: EngineConfig, config: ServerConfig, *, in_process: bool = False, observer: ObserverFactory | None = None) -> None:
    """Serve a checkpoint until SIGTERM or Ctrl-C. Arguments are those of `AsyncLLM.from_config` and of `Server`.

    Raises:
        ValueError: the checkpoint cannot be served.
        OSError: the address is taken, or is not one of this machine's.
    """
    with _bound(config.host, config.port) as listener:  # before the model is loaded, which takes a while
        Server(AsyncLLM.from_config(engine, in_process=in_process, observer=observer), config).run([listener])


def _bound(host: str, port: int) -> socket:
    """A socket at the address, which does not listen yet: nobody shall wait for a model that is being loaded."""
    family = AF_INET6 if ":" in host else AF_INET
    listener = socket(family)
    listener.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen at {host} port {port}: {error.strerror or error}; choose another --host or --port") from error
    return listener
