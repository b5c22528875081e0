"""docs/check.md lists the checks as they are, docs/vllm.md those that vLLM breaks, in words that the tests on a GPU can read."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="the extra `check` is not installed")

import harness.check.inspection  # noqa: F401  registers them
from harness.check.promise import CHECKS

from ..vllm.differences import from_outside

PAGE = Path(__file__).parents[2] / "docs" / "check.md"


def test_the_page_lists_every_check_with_its_promise():
    listed = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `") and line.count("|") == 3]
    assert set(listed) >= {f"| `{check.id}` | {check.promise} |" for check in CHECKS.values()}


def test_what_vllm_breaks_is_told_of_checks_that_there_are():
    page = (PAGE.parent / "vllm.md").read_text(encoding="utf-8")
    _, table = page.split("| check | 0.26 |")
    listed = [line.split("`")[1] for line in table.split("\n\n")[0].splitlines() if line.startswith("| `")]
    assert set(listed) <= set(CHECKS) and len(listed) == len(set(listed))
    for profile in ("vllm-0.26", "vllm-0.29", "vllm-0.32"):
        said = {from_outside(check, profile, token_api=on) for check in CHECKS for on in (False, True)}
        assert said <= {"holds", "violated", "at times", "none"}


@pytest.mark.parametrize(("profile", "token_api", "said"), [("vllm-0.31", True, "violated"), ("vllm-0.31", False, "holds")])
def test_an_aborted_stream_without_a_reason_is_told_of_the_token_api_alone(profile: str, token_api: bool, said: str):
    assert from_outside("abort-running", profile, token_api=token_api) == said
