"""A core in a process of its own: ZeroMQ carries messages, msgspec types them, and a socket pair tells each side when the other is gone.

The socket pair carries nothing. The kernel closes a dead process's end of it, however it died, so that AsyncLLM hears at
once of a core that was killed, and no core outlives the process that it serves.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import transformers
import zmq

from .config import EngineConfig
from .connection import Buffer, ObserverFactory, SentCall
from .loop import serve
from .messages import AnyCall, AnyReport, Call, Report, Shutdown, Stopped

LAST_WORDS_MS = 1000
"""How long the last reports of a core that ended by itself may take to arrive."""

CHILD = "from engine.process import main; main()"


class Boot(msgspec.Struct, frozen=True):
    """The first message: what to serve."""

    config: dict[str, Any]
    observer: ObserverFactory | None


class ProcessConnection:
    """A connection to a core in a process of its own, which ends with this one."""

    def __init__(self, config: EngineConfig, observer: ObserverFactory | None) -> None:
        # Only this user may enter the folder, so nobody else can call the core, or pose as it.
        self._folder = Path(tempfile.mkdtemp(prefix="caesura-"))
        self._context = zmq.Context()
        # Connecting makes a queue at once, so that calls may be sent to a core that is not there yet.
        self._calls = _unlimited(self._context.socket(zmq.PUSH))
        self._calls.connect(_address(self._folder, "calls"))
        self._reports = _unlimited(self._context.socket(zmq.PULL))
        self._reports.bind(_address(self._folder, "reports"))
        self._lifeline, childs_end = socket.socketpair()
        self._lifeline.setblocking(False)
        with childs_end:
            self._process = subprocess.Popen(
                [sys.executable, "-c", CHILD, str(self._folder), str(childs_end.fileno())],
                pass_fds=[childs_end.fileno()],
                env={**os.environ, "PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
                process_group=0,  # Ctrl-C at the terminal is for this process, which then stops the core
            )
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(AnyReport)
        self._poller = zmq.Poller()
        self._poller.register(self._reports, zmq.POLLIN)
        self._poller.register(self._lifeline, zmq.POLLIN)
        self._stopped = False
        self._forget_loop: Callable[[], None] = lambda: None
        boot = Boot({**asdict(config), "checkpoint": str(config.checkpoint)}, observer)
        self._calls.send(self._encoder.encode(boot))

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, call: Call, buffers: Sequence[Buffer] = ()) -> None:
        self._calls.send_multipart([self._encoder.encode(call), *buffers], copy=not buffers)

    def receive(self, timeout_s: float | None = 0) -> Report | None:
        if self._stopped:
            return None
        frame = self._next_frame(timeout_s)
        if frame is None and not self._is_gone():
            return None
        report = Stopped(why=self._cause_of_death()) if frame is None else self._decoder.decode(frame)
        if isinstance(report, Stopped):
            self._stopped = True
            self._forget_loop()
        return report

    def notify(self, loop: asyncio.AbstractEventLoop, arrived: Callable[[], None]) -> None:
        descriptors = [self._reports.getsockopt(zmq.FD), self._lifeline.fileno()]
        for descriptor in descriptors:
            loop.add_reader(descriptor, arrived)
        loop.call_soon(arrived)  # ZeroMQ signals changes: what came before this call would go unnoticed

        def forget() -> None:
            if not loop.is_closed():
                for descriptor in descriptors:
                    loop.remove_reader(descriptor)

        self._forget_loop = forget

    def close(self, timeout_s: float) -> None:
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._forget_loop()
        self._lifeline.close()
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _next_frame(self, timeout_s: float | None) -> bytes | None:
        if timeout_s != 0:
            self._poller.poll(None if timeout_s is None else int(timeout_s * 1000))
        with suppress(zmq.Again):
            return self._reports.recv(zmq.NOBLOCK)
        if self._is_gone() and self._process.wait() >= 0 and self._reports.poll(LAST_WORDS_MS):
            return self._reports.recv()
        return None

    def _is_gone(self) -> bool:
        try:
            return self._lifeline.recv(1) == b""
        except BlockingIOError:
            return False

    def _cause_of_death(self) -> str:
        code = self._process.wait()
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"its process {self._process.pid} {how}"


def main() -> None:
    """What the child runs: `main FOLDER LIFELINE`."""
    folder, lifeline = sys.argv[1], int(sys.argv[2])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, args=(lifeline,), name="lifeline", daemon=True).start()
    transformers.utils.logging.disable_progress_bar()
    port = ProcessPort(folder)
    boot = port.take_boot()
    signal.signal(signal.SIGTERM, lambda *_: port.interrupt("SIGTERM"))
    serve(EngineConfig(**boot.config), boot.observer, port)
    port.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # to take the interpreter apart, with torch in it, takes up to a second for nothing


def _end_with_parent(lifeline: int) -> None:
    os.set_inheritable(lifeline, False)
    with socket.socket(fileno=lifeline) as end:
        end.recv(1)
    os._exit(1)


class ProcessPort:
    """The core's end of a `ProcessConnection`."""

    def __init__(self, folder: str) -> None:
        self._context = zmq.Context()
        self._calls = _unlimited(self._context.socket(zmq.PULL))
        self._calls.bind(_address(folder, "calls"))
        self._calls.bind("inproc://interrupts")
        self._interrupts = _unlimited(self._context.socket(zmq.PUSH))
        self._interrupts.connect("inproc://interrupts")
        self._reports = _unlimited(self._context.socket(zmq.PUSH))
        self._reports.connect(_address(folder, "reports"))
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(AnyCall)

    def take_boot(self) -> Boot:
        return msgspec.msgpack.decode(self._calls.recv(), type=Boot)

    def take(self, *, wait: bool) -> list[SentCall]:
        taken: list[SentCall] = []
        with suppress(zmq.Again):
            while True:
                body, *buffers = self._calls.recv_multipart(0 if wait and not taken else zmq.NOBLOCK, copy=False)
                taken.append(SentCall(self._decoder.decode(body.buffer), [frame.buffer for frame in buffers]))
        return taken

    def send(self, report: Report) -> None:
        self._reports.send(self._encoder.encode(report))

    def interrupt(self, why: str) -> None:
        """From a signal handler: the loop is to stop as if it had been called to, and `take` need not wait for others to call."""
        self._interrupts.send(self._encoder.encode(Shutdown(call=0, drain_s=0, why=why)))

    def close(self) -> None:
        """Wait until the last reports have left."""
        self._context.destroy(linger=LAST_WORDS_MS)


def _unlimited(end: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
    """Neither side ever waits for the other to read, nor loses a message."""
    end.set_hwm(0)
    return end


def _address(folder: Path | str, name: str) -> str:
    return f"ipc://{folder}/{name}"
