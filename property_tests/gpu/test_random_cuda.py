"""Random interleavings on a CUDA device: the model explains every step there, too."""

from __future__ import annotations

import pytest

from harness.fuzz.case import run_case
from harness.fuzz.generate import case_of

torch = pytest.importorskip("torch")

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")]

CASES, SHARE = 300, 25


@pytest.mark.parametrize("first", range(0, CASES, SHARE))
def test_the_model_explains_random_cases(first: int) -> None:
    from harness.backends.torch import TorchBackend

    for seed in range(first, first + SHARE):
        outcome = run_case(case_of(seed, engine={"device": "cuda"}), TorchBackend())
        assert outcome.clean, (seed, outcome.findings)
