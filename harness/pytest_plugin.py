"""Fuzzing as a pytest fixture: `def test_engine(caesura): caesura(MyEngine)`.

pytest loads this with every run where Caesura is installed, so it imports nothing before the fixture is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

CASES = 200


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("caesura", "fuzzing of inference engines")
    group.addoption(
        "--caesura-cases", type=int, default=CASES, metavar="N", help=f"cases that a test runs, unless it says itself ({CASES})"
    )
    group.addoption("--caesura-seed", type=int, default=0, metavar="S", help="seed of the first case (0)")


@pytest.fixture
def caesura(pytestconfig: pytest.Config, tmp_path: Path) -> Callable[..., int]:
    """Fuzz an engine: a class of the protocol `harness.Engine`, a backend, or a name such as `torch`.

    The test fails with the smallest case found, which is left as `minimal.yaml` in its `tmp_path`.
    Called with the engine and optionally `cases` and `seed`, it returns how many operations and steps were carried out.
    """
    from harness.fuzz.face import AnyEngine, Found, hunt

    def fuzz(engine: AnyEngine, *, cases: int | None = None, seed: int | None = None) -> int:
        most: int = cases or pytestconfig.getoption("--caesura-cases")  # type: ignore[assignment]
        first: int = pytestconfig.getoption("--caesura-seed") if seed is None else seed  # type: ignore[assignment]
        try:
            return hunt(engine, cases=most, seed=first)
        except Found as found:
            path = tmp_path / "minimal.yaml"
            path.write_text(found.scenario, encoding="utf-8")
            pytest.fail(f"{found}\nsaved as {path}", pytrace=False)

    return fuzz
