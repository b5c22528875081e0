"""docs/check.md lists the checks as they are."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="the extra `check` is not installed")

import harness.check.inspection  # noqa: F401  registers them
from harness.check.promise import CHECKS

PAGE = Path(__file__).parents[2] / "docs" / "check.md"


def test_the_page_lists_every_check_with_its_promise():
    listed = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `") and line.count("|") == 3]
    assert set(listed) >= {f"| `{check.id}` | {check.promise} |" for check in CHECKS.values()}
