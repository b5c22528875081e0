"""What the tests of the server share: checkpoints, one server for each file, a client that leaves it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from harness.checkpoints import ensure, make_tiny

if TYPE_CHECKING:
    import httpx

    from engine.server import Server


@pytest.fixture(scope="session")
def tiny() -> Path:
    return ensure("tiny")


@pytest.fixture(scope="session")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the same shape with other weights."""
    folder = tmp_path_factory.mktemp("checkpoints") / "other"
    make_tiny(folder, seed=7)
    return folder


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[Server]:
    from .servers import serving

    with serving(tiny) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    """Speaks to the server, and leaves it running and empty."""
    import httpx

    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client
        client.post("/abort_requests").raise_for_status()
        client.post("/resume").raise_for_status()
