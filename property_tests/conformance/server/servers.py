"""Servers for tests: a checkpoint behind HTTP on a free port, in a thread of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from engine import AsyncLLM, EngineConfig
from engine.server import Server, ServerConfig

SHAPE = {"block_size": 16, "num_blocks": 64, "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 128}
CONFIG = {"served_model_name": "tiny", "port": 0, "dev_mode": True, "drain_s": 0}


@contextmanager
def serving(checkpoint: Path, *, in_process: bool = True, config: dict[str, Any] | None = None, **shape: Any) -> Iterator[Server]:
    """A server that runs while the block does; `url` says where."""
    engine = EngineConfig(checkpoint=checkpoint, **{**SHAPE, **shape})
    server = Server(AsyncLLM.from_config(engine, in_process=in_process), ServerConfig(**{**CONFIG, **(config or {})}))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server ended before it stood"
            time.sleep(0.01)
        yield server
    finally:
        server.should_exit = True
        thread.join()
