"""A core in a process of its own: what becomes of it and of its callers when one of them dies, or is told to stop."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from engine import AsyncLLM, EngineConfig, EngineDeadError, ObserverFactory, SamplingParams
from engine.process import ProcessConnection
from harness.checkpoints import ensure

PROMPT = list(range(20, 30))
HANG_S = 60
"""A wait that lasts so long is a hang; what is waited for here takes milliseconds on a quiet machine."""


def start(**arguments) -> AsyncLLM:
    shape = {"block_size": 8, "num_blocks": 256, "max_model_len": 512, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return AsyncLLM.from_config(EngineConfig(checkpoint=ensure("tiny"), **shape), **arguments)


def core_of(llm: AsyncLLM) -> int:
    """The pid of its process."""
    assert isinstance(llm._connection, ProcessConnection)
    return llm._connection.pid


def is_running(pid: int) -> bool:
    """Whether there is such a process, zombies aside."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + HANG_S
    while is_running(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.01)


async def generate(llm: AsyncLLM, request_id: str, *, max_tokens: int = 400, began: asyncio.Event | None = None) -> str | None:
    """The finish reason."""
    reason = None
    async for output in llm.generate(PROMPT, SamplingParams(max_tokens=max_tokens, ignore_eos=True), request_id):
        reason = output.outputs[0].finish_reason
        if began is not None:
            began.set()
    return reason


async def generating(llm: AsyncLLM, count: int) -> list[asyncio.Task[str | None]]:
    events = [asyncio.Event() for _ in range(count)]
    tasks = [asyncio.create_task(generate(llm, f"r{i}", began=began)) for i, began in enumerate(events)]
    await asyncio.gather(*(began.wait() for began in events))
    return tasks


def test_everyone_who_waits_hears_of_a_core_that_was_killed_while_paused():
    async def kill() -> None:
        llm = start()
        tasks = await generating(llm, 2)
        await llm.pause_generation(mode="keep")
        late = asyncio.create_task(generate(llm, "late"))
        while (await llm.counters()).parked == 0:
            pass
        pid = core_of(llm)
        os.kill(pid, signal.SIGSTOP)  # so that this call is surely waiting when the core dies
        asked = asyncio.create_task(llm.resume_generation())
        await asyncio.sleep(0)
        os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(HANG_S):
            for error in await asyncio.gather(*tasks, late, asked, return_exceptions=True):
                assert isinstance(error, EngineDeadError), error
                assert str(error) == f"the engine has stopped: its process {pid} was killed by SIGKILL"
        with pytest.raises(EngineDeadError, match="SIGKILL"):
            await llm.is_paused()
        assert llm.dead_error is not None
        llm.shutdown()

    asyncio.run(kill())


def test_a_core_that_is_told_to_stop_hands_over_what_there_is():
    async def stop() -> None:
        llm = start()
        tasks = await generating(llm, 2)
        pid = core_of(llm)
        os.kill(pid, signal.SIGTERM)
        async with asyncio.timeout(HANG_S):
            assert await asyncio.gather(*tasks) == ["abort", "abort"]
            with pytest.raises(EngineDeadError, match="SIGTERM"):
                while True:
                    await llm.is_paused()
        llm.shutdown()
        assert not is_running(pid)

    asyncio.run(stop())


def test_a_core_that_breaks_says_why(tmp_path, monkeypatch):
    (tmp_path / "breaking_observer.py").write_text(
        "from engine import Observer\n"
        "class Breaks(Observer):\n"
        "    def __init__(self, at): self.at = at\n"
        "    def launched(self, step, batch):\n"
        "        if step == self.at: raise OSError('no space left on device')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    async def broken() -> None:
        llm = start(observer=ObserverFactory("breaking_observer:Breaks", {"at": 3}))
        async with asyncio.timeout(HANG_S):
            errors = await asyncio.gather(generate(llm, "r1"), generate(llm, "r2"), return_exceptions=True)
        assert [str(error) for error in errors] == ["the engine has stopped: OSError: no space left on device"] * 2
        llm.shutdown()

    asyncio.run(broken())


def test_an_observer_that_is_not_there_is_no_engine():
    with pytest.raises(ValueError, match=r"no observer 'nowhere:Nobody' \(expected 'module:callable'\)"):
        start(observer=ObserverFactory("nowhere:Nobody"))


def test_an_engine_that_is_forgotten_stops_and_leaves_nothing():
    llm = start()
    pid, folder = core_of(llm), llm._connection._folder  # type: ignore[attr-defined]
    assert is_running(pid) and folder.is_dir()
    del llm
    gc.collect()
    assert not is_running(pid) and not folder.exists()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=lambda how: how.name)
def test_no_core_outlives_the_program_that_it_serves(how):
    """Ctrl-C goes to the whole group in the foreground, as at a terminal."""
    program = (
        "import asyncio, sys\n"
        "from engine import AsyncLLM, EngineConfig\n"
        "llm = AsyncLLM.from_config(EngineConfig(checkpoint=sys.argv[1], block_size=8, num_blocks=64, max_model_len=64,"
        " max_num_seqs=4, max_num_batched_tokens=64))\n"
        "async def wait():\n"
        "    await llm.pause_generation()\n"
        "    print(llm._connection.pid, flush=True)\n"
        "    await asyncio.sleep(3600)\n"
        "asyncio.run(wait())\n"
    )
    command = [sys.executable, "-c", program, str(ensure("tiny"))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True) as parent:
        assert parent.stdout is not None and parent.stderr is not None
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        (os.killpg if how is signal.SIGINT else os.kill)(parent.pid, how)
        said = parent.stderr.read()
        wait_until_gone(pid)
    assert "engine/loop.py" not in said and "engine/process.py" not in said, "the core was interrupted, too"
