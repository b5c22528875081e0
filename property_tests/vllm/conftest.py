"""These tests drive real vLLM: where it is not installed they are skipped, with the reason. `nox -s vllm` has it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if find_spec("vllm") is not None:
        return
    missing = pytest.mark.skip(reason="vLLM is not installed here: nox -s vllm")
    for item in items:
        if item.path.parent == Path(__file__).parent and "needs_vllm" in item.fixturenames:
            item.add_marker(missing)


@pytest.fixture
def needs_vllm() -> None:
    """Marks a test as one that imports vLLM."""
