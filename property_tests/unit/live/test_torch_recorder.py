"""The recorder of our engine, where calls carry no notes: what it tells of them, and where it ends."""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the extra `engine` is not installed")

from safetensors.torch import load_file, save_file

from engine import EngineConfig, EngineCore, EngineDeadError
from engine import messages as m
from engine.loop import CoreLoop, make_observer
from harness.backends.torch_live import TorchLive
from harness.backends.torch_recorder import Recorder
from harness.checkpoints import ensure
from harness.events import Called, Committed, Finished
from harness.log import Log, read_log
from harness.operations import Prompt, Submit
from harness.scenario import EngineShape
from harness.trial import review

from ..engine.test_engine_loop import ScriptedPort, pause, submit

SHAPE = {"block_size": 4, "num_blocks": 32, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 16}


NO_HANDLE = "an id/that no log has"


@pytest.fixture
def record(tmp_path: Path) -> Callable[[ScriptedPort], Log]:
    """record(port): the log of an engine that was asked for what the port brings, until it stops. Its checkpoint is gone by then."""

    def run(port: ScriptedPort) -> Log:
        checkpoint = shutil.copytree(ensure("tiny"), tmp_path / "checkpoint")
        observer = make_observer(TorchLive().recorder(EngineShape(checkpoint="tiny", **SHAPE), tmp_path / "log"))
        core = EngineCore(EngineConfig(checkpoint=checkpoint, **SHAPE), observer=observer)
        observer.attached(core)
        shutil.rmtree(checkpoint)
        CoreLoop(core, observer, port).run()
        return read_log(tmp_path / "log")

    return run


def part(call: int, part: int | None, of: int | None, folder: Path | None = None) -> m.UpdateWeights:
    return m.UpdateWeights(call=call, folder=str(folder or ensure("tiny")), part=part, of=of)


def start(call: int) -> m.StartWeightUpdate:
    return m.StartWeightUpdate(call=call, allow_unpaused=False)


def finish(call: int, version: str = "v2") -> m.FinishWeightUpdate:
    return m.FinishWeightUpdate(call=call, version=version)


def paused(*calls: m.Call) -> ScriptedPort:
    """Calls from number 3 on, under a pause, of an engine that ran a request."""
    return ScriptedPort([submit(1, "r1", 1)], [pause(2, "keep"), *calls])


def holds(log: Log) -> bool:
    trial = review(log, None)
    assert (trial.verdict.status, trial.verdict.reasons) == ("holds", ())
    return trial.closed is not None and trial.closed.why == "drained"


def operations(log: Log) -> list[str]:
    """Number and verb of each call that is told, but those of `paused`."""
    called = (entry.event for entry in log.entries if isinstance(entry.event, Called))
    return [f"{event.op} {next(iter(event.operation))}" for event in called if event.op not in (1, 2)]


def ill_fitting(folder: Path, *, half_way: bool) -> Path:
    """Weights of which one fits nowhere: all by itself, or after one that does."""
    folder.mkdir()
    name, tensor = min(load_file(ensure("tiny") / "model.safetensors").items())
    save_file({**({name: tensor} if half_way else {}), "zzz.of_another_model": tensor.clone()}, folder / "model.safetensors")
    return folder


def test_what_a_shutdown_ends_was_aborted_by_it(record):
    assert holds(record(ScriptedPort([submit(1, "r1"), submit(2, NO_HANDLE)], [], [pause(3, "keep")])))


def test_an_accepted_call_without_words_ends_the_log_and_nothing_else(record, caplog: pytest.LogCaptureFixture):
    session = [pause(1, "keep"), start(2), part(3, None, None), part(4, 1, 2)]
    port = ScriptedPort(session, [part(5, 2, 2), finish(6), m.Resume(call=7)])
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

    log = record(ScriptedPort([submit(1, "r1"), twenty(2), part(3, 3, 2), pause(4, "keep"), m.Resume(call=5)], []))
    assert holds(log) and operations(log) == ["4 pause", "5 resume", "0 abort"]


def test_a_call_whose_tensors_were_refused_unwritten_is_left_out(record, tmp_path: Path):
    bad = ill_fitting(tmp_path / "bad", half_way=False)
    swap = m.LoadWeights(call=3, folder=str(bad), version="v2")
    port = paused(swap, start(4), part(5, None, None, bad), part(6, None, None), finish(7))
    log = record(port)
    assert [word for word in port.words if word.startswith("refusal")] == ["refusal 3 UpdateFailed", "refusal 5 UpdateFailed"]
    assert holds(log) and operations(log) == ["4 start_weight_update", "6 update_weights", "7 finish_weight_update"]


def test_a_call_without_words_that_broke_after_its_first_byte_ends_the_log(record, tmp_path: Path):
    log = record(paused(start(3), part(4, 1, 20, ill_fitting(tmp_path / "bad", half_way=True))))
    assert operations(log) == ["3 start_weight_update"]
    assert log.entries[-1].event.why == "interrupted"


def test_a_refused_part_says_nothing_of_how_many_there_are(record):
    log = record(paused(start(3), part(4, None, None), part(5, 3, 2), part(6, None, None), finish(7)))
    assert holds(log)
    assert operations(log) == ["3 start_weight_update", "4 update_weights", "6 update_weights", "7 finish_weight_update"]


@pytest.mark.parametrize("broke", [False, True], ids=["committed", "broke"])
def test_a_finish_without_a_session_is_told_after_a_session_too(record, tmp_path: Path, broke: bool):
    end = part(5, None, None, ill_fitting(tmp_path / "bad", half_way=True)) if broke else finish(5)
    log = record(paused(start(3), part(4, None, None), end, finish(6)))
    assert holds(log) and operations(log)[-1] == "6 finish_weight_update"


def test_without_notes_nothing_is_read_and_a_commit_tells_no_checksums(record):
    port = paused(start(3), finish(4), m.GetWeightVersion(call=5))
    log = record(port)
    assert port.words[-3:-1] == ["answer 4 finished v2", "answer 5 v2"]
    (committed,) = [entry.event for entry in log.entries if isinstance(entry.event, Committed)]
    assert holds(log) and (committed.version, committed.sent, committed.resident) == ("v2", "", ())


def test_a_label_stays_as_it_is_though_a_request_is_called_so(record):
    label = m.UpdateWeightVersion(call=2, version=NO_HANDLE, allow_unpaused=True)
    log = record(ScriptedPort([submit(1, NO_HANDLE, 2), label], []))
    (finished,) = [entry.event for entry in log.entries if isinstance(entry.event, Finished)]
    assert holds(log) and finished.request != NO_HANDLE
    assert [span.version for span in finished.spans] == [NO_HANDLE]


def break_recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(self: Recorder, *args: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Recorder, "launched", breaks)


def test_a_fault_of_the_recorder_ends_the_recording_and_nothing_else(record, monkeypatch, caplog: pytest.LogCaptureFixture):
    break_recorder(monkeypatch)
    port = paused(m.Resume(call=3))
    with caplog.at_level(logging.WARNING):
        log = record(port)
    said = ["answer 1 queued", "outputs r1+1 length", "answer 2 paused", "answer 3 resumed", "stopped: the script is over"]
    assert port.words == said
    assert [record.message for record in caplog.records] == ["recording stops, the engine goes on: RuntimeError: a fault of ours"]
    assert operations(log) == [] and log.entries[-1].event.why == "interrupted"


def test_in_a_run_of_ours_a_fault_of_the_recorder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    break_recorder(monkeypatch)

    async def run() -> None:
        live = TorchLive(in_process=True)
        await live.start(EngineShape(checkpoint="tiny", **SHAPE), tmp_path / "log")
        try:
            await live.call(Submit(id="r1", prompt=Prompt(tokens=(20, 21))), lambda outputs: None)
        finally:
            await live.stop()

    with pytest.raises(EngineDeadError, match="a fault of ours"):
        asyncio.run(run())


def test_the_log_of_an_engine_that_breaks_says_so(record, monkeypatch: pytest.MonkeyPatch):
    def breaks(self: CoreLoop) -> None:
        raise OSError("a fault of ours")

    monkeypatch.setattr(CoreLoop, "_turn", breaks)
    (*_, last) = record(ScriptedPort([submit(1, "r1")])).entries
    assert (last.event.why, last.event.error) == ("crashed", "OSError: a fault of ours")
