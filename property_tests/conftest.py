"""What all tests share: the order of the kinds, and how Hypothesis draws."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import settings

# Before torch is imported: a model of a few hundred kilobytes is quickest on one thread, above all on a busy machine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts tests in the background has them ignore Ctrl-C, and what they start, too; some tests press it.
signal.signal(signal.SIGINT, signal.default_int_handler)

QUICK_FIRST = ("unit", "properties", "conformance")

# The same examples on every run and every machine, so that a red test is red again for whoever looks
# into it; no deadline, because on two busy cores a slow example is not a wrong one.
settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--long", action="store_true", help="random tests in full: vLLM's 21,000 cases, the HTTP server's thousands")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Quick kinds of tests first, so that the commonest failures show soonest; within a kind the order stays."""
    here = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        kind = item.path.relative_to(here).parts[0]
        return QUICK_FIRST.index(kind) if kind in QUICK_FIRST else len(QUICK_FIRST)

    items.sort(key=place)
