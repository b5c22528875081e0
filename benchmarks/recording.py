"""What recording costs an engine: tokens per second bare, and with every transition turned into events and written to a log.

Both engines hold the same requests in steady decode and take turns, a step each, in one run on one thread; times are CPU
time on the CPU, wall time on a GPU. The bare engine has nobody watching and its outputs are thrown away.

    python benchmarks/recording.py [CHECKPOINT] [--device cuda] [--requests 16] [--steps 60] [--async]
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import transformers

from engine import EngineConfig, EngineCore, SamplingParams
from harness.backends import opened_event
from harness.backends.torch import TorchBackend
from harness.checkpoints import ensure
from harness.events import Called
from harness.log import LogWriter
from harness.operations import Prompt, Submit, to_data
from harness.scenario import EngineShape

PROMPT = 16
ALLOWED = 0.02
"""The share of its tokens per second that recording may cost an engine."""


def shape_of(arguments: argparse.Namespace) -> EngineShape:
    longest = PROMPT + arguments.steps + 8
    return EngineShape(
        checkpoint=arguments.checkpoint,
        block_size=16,
        num_blocks=arguments.requests * (longest // 16 + 1),
        max_model_len=longest,
        max_num_seqs=arguments.requests,
        max_num_batched_tokens=max(2048, arguments.requests * PROMPT),
        async_scheduling=arguments.asynchronous,
        device=arguments.device,
    )


def bare(shape: EngineShape, requests: int) -> Callable[[], object]:
    """A step of an engine that nobody watches."""
    core = EngineCore(EngineConfig(**{**shape.model_dump(), "checkpoint": ensure(shape.checkpoint)}))
    for index in range(requests):
        prompt = Prompt(tokens=PROMPT, seed=index).token_ids or ()
        core.submit(f"r{index}", prompt, SamplingParams(max_tokens=shape.max_model_len, ignore_eos=True))

    def step() -> None:
        core.step()
        core.take_outputs()

    return step


def recorded(shape: EngineShape, requests: int, folder: Path) -> Callable[[], object]:
    """A step of an engine behind its adapter, written to a log."""
    backend, writer = TorchBackend(), LogWriter(folder)
    writer.append(0, [opened_event(shape, backend, backend.start(shape), digest="", seed=0)])
    for index in range(requests):
        submit = Submit(id=f"r{index}", prompt=Prompt(tokens=PROMPT, seed=index), max_tokens=shape.max_model_len, ignore_eos=True)
        called = Called(op=index, operation=to_data(submit), by="benchmark")
        writer.append(0, [called, *backend.apply(index, submit)])
    return lambda: writer.append(0, backend.step())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("checkpoint", nargs="?", default="smollm2")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--async", action="store_true", dest="asynchronous")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    shape, requests = shape_of(arguments), arguments.requests
    clock = time.perf_counter if arguments.device == "cuda" else time.process_time
    with tempfile.TemporaryDirectory() as folder:
        engines = {"bare": bare(shape, requests), "recorded": recorded(shape, requests, Path(folder))}
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(arguments.steps):
            for name, step in engines.items():
                began = clock()
                step()
                seconds[name].append(clock() - began)
    rates = {name: requests / statistics.median(times[4:]) for name, times in seconds.items()}
    cost = 1 - rates["recorded"] / rates["bare"]
    print(f"{platform.platform()}; Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}")
    how = "asynchronous" if arguments.asynchronous else "synchronous"
    print(f"{arguments.checkpoint} on {arguments.device}, {requests} requests in decode, {how}, median of {arguments.steps - 4} steps")
    print(f"  bare      {rates['bare']:10,.1f} tokens/s")
    print(f"  recorded  {rates['recorded']:10,.1f} tokens/s, {cost:+.2%} of it (allowed: {ALLOWED:.0%})")


if __name__ == "__main__":
    main()
