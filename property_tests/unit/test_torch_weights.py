"""What our engine's adapter says of weights: what was sent, what lies in memory, and how sources go bad."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from engine.weights import WeightSession, WeightTarget
from harness.backends.torch import TorchBackend
from harness.events import Committed, Event, PartReceived, Returned, UpdateFailed
from harness.operations import (
    FinishWeightUpdate,
    Operation,
    Pause,
    Perturbation,
    Sleep,
    Spoil,
    StartWeightUpdate,
    SwapWeights,
    UpdateWeights,
    WakeUp,
    WeightSource,
)
from harness.scenario import EngineShape

KEEP = Pause(mode="keep")
ORIGINAL = WeightSource(original=True)
NEW = WeightSource(perturb=Perturbation(seed=1, scale=0.1))


@pytest.fixture
def told() -> Iterator[Any]:
    """told(operations): the events of a list of operations, one after the other on one engine."""
    backend = TorchBackend()
    backend.start(EngineShape(block_size=4, num_blocks=8, max_model_len=16))
    numbers = iter(range(1000))

    def apply(*operations: Operation) -> list[Event]:
        return [event for operation in operations for event in backend.apply(next(numbers), operation)]

    yield apply
    backend.stop()


def commits(events: list[Event]) -> list[Committed]:
    return [event for event in events if isinstance(event, Committed)]


def parts(of: int, source: WeightSource = NEW) -> list[Operation]:
    updates = [UpdateWeights(source=source, part=part, of=of) for part in range(1, of + 1)]
    return [StartWeightUpdate(), *updates, FinishWeightUpdate()]


# ---- checksums ----


def test_a_commit_says_that_what_was_sent_lies_in_memory(told):
    (whole,), (cut,), (back,) = (commits(told(*calls)) for calls in ([KEEP, *parts(1)], parts(7), [SwapWeights(source=ORIGINAL)]))
    for committed in (whole, cut, back):
        assert committed.sent == committed.resident[0] != "" and not committed.differing and not committed.moved
    assert whole.sent == cut.sent != back.sent


def test_a_commit_of_no_tensor_is_about_the_weights_that_were_there(told):
    (nothing,), (original,) = commits(told(KEEP, StartWeightUpdate(), FinishWeightUpdate())), commits(told(SwapWeights(source=ORIGINAL)))
    assert nothing.sent == nothing.resident[0] == original.sent


def test_a_part_of_the_weights_is_counted_with_those_that_it_left(told):
    half = [KEEP, StartWeightUpdate(), UpdateWeights(source=NEW, part=1, of=2)]
    told(*half)
    (committed,) = commits(told(UpdateWeights(source=ORIGINAL, part=2, of=2), FinishWeightUpdate()))
    assert committed.sent == committed.resident[0]


def test_weights_written_wrongly_are_named(told, monkeypatch):
    right = WeightTarget.write

    def rolled(self, name, tensor):
        return right(self, name, tensor.roll(1, 0) if "q_proj" in name else tensor)

    monkeypatch.setattr(WeightTarget, "write", rolled)
    (committed,) = commits(told(KEEP, SwapWeights(source=NEW)))
    assert committed.sent != committed.resident[0]
    assert committed.differing and all("q_proj" in name for name in committed.differing)


def test_weights_that_were_not_written_at_all_are_named_ten_at_most(told, monkeypatch):
    monkeypatch.setattr(WeightSession, "write", lambda self, tensors: (len(list(tensors)), 0))
    (committed,) = commits(told(KEEP, SwapWeights(source=NEW)))
    assert len(committed.differing) == 10


def test_weights_that_moved_in_an_update_are_named(told, monkeypatch):
    def elsewhere(self, name, tensor):
        self._tensors[name].untyped_storage().resize_(0)
        keep = torch.empty(1024)  # so that the allocator hands out another place
        self._tensors[name].untyped_storage().resize_(tensor.nbytes)
        self._tensors[name].copy_(tensor)
        kept.append(keep)
        return tensor.nbytes

    kept: list[Any] = []
    told(KEEP)
    monkeypatch.setattr(WeightTarget, "write", elsewhere)
    (committed,) = commits(told(SwapWeights(source=NEW)))
    assert committed.moved and not committed.differing


def test_weights_may_move_in_a_sleep(told):
    (committed,) = commits(told(Sleep(level=2, mode="keep"), WakeUp(tags=("weights",)), SwapWeights(source=NEW)))
    assert committed.sent == committed.resident[0] and not committed.moved


# ---- bad tensors ----

WORDS = {
    "name": "no weight is called",
    "shape": "has shape",
    "nan": "holds NaN or infinity",
    "infinity": "holds NaN or infinity",
}


@pytest.mark.parametrize("how", WORDS)
def test_a_bad_tensor_is_refused_before_a_byte_of_it_is_written(told, how):
    bad = NEW.model_copy(update={"spoil": Spoil(how=how)})
    events = told(KEEP, StartWeightUpdate(), UpdateWeights(source=bad), UpdateWeights(source=NEW), FinishWeightUpdate())
    (failed,) = [event for event in events if isinstance(event, UpdateFailed)]
    assert not failed.wrote and WORDS[how] in failed.why
    (committed,) = commits(events)
    assert committed.sent == committed.resident[0]


@pytest.mark.parametrize("how", WORDS)
@pytest.mark.parametrize("tensor", [1, 1000], ids=["in the middle", "behind the last"])
def test_a_bad_tensor_behind_a_good_one_closes_the_session(told, how, tensor):
    bad = NEW.model_copy(update={"spoil": Spoil(how=how, tensor=tensor)})
    events = told(KEEP, SwapWeights(source=bad))
    (failed,) = [event for event in events if isinstance(event, UpdateFailed)]
    assert failed.wrote and WORDS[how] in failed.why
    assert not any(isinstance(event, PartReceived | Committed) for event in events)
    last = events[-1]
    assert isinstance(last, Returned) and last.error is not None and last.error.code == "failed"
    (committed,) = commits(told(SwapWeights(source=ORIGINAL)))
    assert committed.sent == committed.resident[0] and not committed.differing
