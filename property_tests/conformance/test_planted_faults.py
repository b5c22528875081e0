"""Whoever breaks the engine is found: each fault here is a way in which engines were really wrong.

A mutation of the engine's own classes, then the same random cases that the right engine passes
without a mismatch. What must be found is a difference from the model or a violated invariant.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from ..properties.lockstep_machine import LockstepMachine

pytest.importorskip("torch")

from engine.blocks import BlockPool, PrefixDigests
from engine.core import EngineCore
from engine.request import Request
from engine.scheduler import Scheduler

CASES = 200
"""Far fewer are needed; without shrinking, a find ends the test at once."""

Plant = Callable[[pytest.MonkeyPatch], None]


def digests_ignore_the_salt(patch: pytest.MonkeyPatch) -> None:
    right = PrefixDigests.__init__
    patch.setattr(PrefixDigests, "__init__", lambda self, block_size, salt: right(self, block_size, None))


def an_aborted_request_keeps_its_blocks(patch: pytest.MonkeyPatch) -> None:
    """Its blocks are freed only if it ran to its end (vllm#41180)."""
    right = Scheduler._free

    def free(self: Scheduler, request: Request) -> None:
        if request.status.value != "finished" or request.num_output_tokens >= request.params.max_tokens:
            right(self, request)

    patch.setattr(Scheduler, "_free", free)


def a_clear_leaves_the_prefix_index(patch: pytest.MonkeyPatch) -> None:
    """Old KV is hit after the update (NeMo-RL#4018)."""
    patch.setattr(BlockPool, "clear", lambda self: True)


def a_clear_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """The refusal to reset held blocks is ignored, and frozen requests go on over old KV (vllm#34382)."""
    patch.setattr(EngineCore, "_clear_cache", lambda self: None)


def a_preempted_request_goes_to_the_end_of_the_queue(patch: pytest.MonkeyPatch) -> None:
    right = Scheduler._preempt

    def preempt(self: Scheduler, request: Request, *, by: Request | None) -> None:
        right(self, request, by=by)
        self.waiting.append(self.waiting.popleft())

    patch.setattr(Scheduler, "_preempt", preempt)


def a_request_keeps_the_version_of_its_first_token(patch: pytest.MonkeyPatch) -> None:
    """One label for a request, stamped when it began (vllm#54443)."""
    right = Request.append

    def append(self: Request, token_id: int, *, version: str) -> None:
        right(self, token_id, version=self.weight_versions[0].version if self.weight_versions else version)

    patch.setattr(Request, "append", append)


def a_later_wait_leaves_parked_requests_behind(patch: pytest.MonkeyPatch) -> None:
    right = EngineCore.begin_pause

    def begin_pause(self: EngineCore, mode: str = "abort", *, clear_cache: bool = True):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(Scheduler, "unpark", lambda self: None)
            return right(self, mode, clear_cache=clear_cache)  # type: ignore[arg-type]

    patch.setattr(EngineCore, "begin_pause", begin_pause)


def a_failed_update_goes_unnoticed(patch: pytest.MonkeyPatch) -> None:
    """Half-new weights are served (trl#6913)."""
    patch.setattr(EngineCore, "is_out_of_service", property(lambda self: False))
    right = EngineCore._update_failed

    def update_failed(self: EngineCore, phase, error: Exception, *, wrote: bool):
        try:
            right(self, phase, error, wrote=wrote)
        finally:
            self._failed_update = None

    patch.setattr(EngineCore, "_update_failed", update_failed)


FAULTS: tuple[Plant, ...] = (
    digests_ignore_the_salt,
    an_aborted_request_keeps_its_blocks,
    a_clear_leaves_the_prefix_index,
    a_clear_is_forgotten,
    a_preempted_request_goes_to_the_end_of_the_queue,
    a_request_keeps_the_version_of_its_first_token,
    a_later_wait_leaves_parked_requests_behind,
    a_failed_update_goes_unnoticed,
)


def machine() -> type[LockstepMachine]:
    from harness.backends.torch import TorchBackend

    return type("PlantedMachine", (LockstepMachine,), {"make_backend": staticmethod(TorchBackend)})


@pytest.mark.parametrize("plant", FAULTS, ids=lambda plant: plant.__name__)
def test_random_cases_find(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    quick = settings(max_examples=CASES, stateful_step_count=30, phases=[Phase.generate], database=None)
    with pytest.raises(AssertionError, match=r"Mismatch\(|Violation\("):
        run_state_machine_as_test(machine(), settings=quick)
