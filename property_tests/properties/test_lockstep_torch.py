"""The model explains our engine, whatever is asked of it and in whatever order."""

from __future__ import annotations

import pytest
from hypothesis import settings

from .lockstep_machine import LockstepMachine

pytest.importorskip("torch")


class TorchMachine(LockstepMachine):
    @staticmethod
    def make_backend():
        from harness.backends.torch import TorchBackend

        return TorchBackend()


TestTorch = TorchMachine.TestCase
TestTorch.settings = settings(max_examples=300, stateful_step_count=30)
