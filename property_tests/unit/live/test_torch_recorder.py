"""The recorder of our engine, where calls carry no notes: what it tells of them, and where it ends."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the extra `engine` is not installed")

from engine import EngineConfig, EngineCore
from engine import messages as m
from engine.loop import CoreLoop, make_observer
from harness.backends.torch_live import TorchLive
from harness.checkpoints import ensure
from harness.events import Called
from harness.log import Log, read_log
from harness.scenario import EngineShape
from harness.trial import review

from ..engine.test_engine_loop import ScriptedPort, pause, submit

SHAPE = {"block_size": 4, "num_blocks": 32, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}


@pytest.fixture
def record(tmp_path: Path) -> Callable[[ScriptedPort], Log]:
    """record(port): the log of an engine that was asked for what the port brings, until it stops."""

    def run(port: ScriptedPort) -> Log:
        observer = make_observer(TorchLive().recorder(EngineShape(checkpoint="tiny", **SHAPE), tmp_path / "log"))
        core = EngineCore(EngineConfig(checkpoint=ensure("tiny"), **SHAPE), observer=observer)
        observer.attached(core)
        CoreLoop(core, observer, port).run()
        return read_log(tmp_path / "log")

    return run


def part(call: int, part: int | None, of: int | None) -> m.UpdateWeights:
    return m.UpdateWeights(call=call, folder=str(ensure("tiny")), part=part, of=of)


def test_what_a_shutdown_ends_was_aborted_by_it(record):
    trial = review(record(ScriptedPort([submit(1, "r1"), submit(2, "an id/that no log has")], [], [pause(3, "keep")])), None)
    assert (trial.verdict.status, trial.verdict.reasons) == ("holds", ())
    assert trial.closed is not None and trial.closed.why == "drained"


def test_an_accepted_call_without_words_ends_the_log_and_nothing_else(record, caplog: pytest.LogCaptureFixture):
    session = [pause(1, "keep"), m.StartWeightUpdate(call=2, allow_unpaused=False), part(3, None, None), part(4, 1, 2)]
    port = ScriptedPort(session, [part(5, 2, 2), m.FinishWeightUpdate(call=6, version="v2"), m.Resume(call=7)])
    with caplog.at_level(logging.WARNING):
        log = record(port)
    assert port.words[-5:-1] == ["answer 4 updated", "answer 5 updated", "answer 6 finished v2", "answer 7 resumed"]
    assert [record.message for record in caplog.records] == [
        "recording stops, the engine goes on: a log has no words for this call of update_weights"
    ]
    trial = review(log, None)
    assert trial.closed is not None and trial.closed.why == "interrupted"
    assert not [judgement for judgement in trial.verdict.judgements if judgement.status == "violated"]


def test_a_refused_call_without_words_is_left_out(record):
    def twenty(call: int) -> m.UpdateWeights:
        return part(call, 1, 20)

    trial = review(record(ScriptedPort([submit(1, "r1"), twenty(2), part(3, 3, 2), pause(4, "keep"), m.Resume(call=5)], [])), None)
    assert (trial.verdict.status, trial.verdict.reasons) == ("holds", ())
    assert [entry.event.op for entry in trial.entries if isinstance(entry.event, Called)] == [1, 4, 5, 0]


def test_the_log_of_an_engine_that_breaks_says_so(record, monkeypatch: pytest.MonkeyPatch):
    def breaks(self: CoreLoop) -> None:
        raise OSError("a fault of ours")

    monkeypatch.setattr(CoreLoop, "_turn", breaks)
    (*_, last) = record(ScriptedPort([submit(1, "r1")])).entries
    assert (last.event.why, last.event.error) == ("crashed", "OSError: a fault of ours")
