"""What the recorder costs a server: tokens a second of vLLM's engine core with it and without, in one process.

    python benchmarks/recorder_overhead.py [CHECKPOINT] [--async] [--tokens 32]

One engine core with two schedulers, vLLM's own and the recorder. It serves the same 32 requests in short slices, with one and with the
other in turns, so that what else the machine does meets both alike. A pair of slices gives a ratio. Time is that of the processor on
a CPU, which counts nothing but this process, and the clock's on a GPU, where vLLM compiles the model and replays CUDA graphs as it does
by itself. Medians, with the quartiles of the ratio.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from harness.backends.vllm.install import installed, prepare_environment
from harness.checkpoints import ensure

REQUESTS, PROMPT = 32, 4
TOKENS_IN_ALL = 40 * 32
"""Of each request, over all pairs of slices: longer slices are fewer."""


class Slice(NamedTuple):
    """What serving the requests once took."""

    seconds: float
    steps: int


class Device(NamedTuple):
    """What vLLM runs on, and how it is used there."""

    name: str
    dtype: str
    block_size: int
    clock: Callable[[], float]
    time: str


def device() -> Device:
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        return Device("cpu", "float32", 32, time.process_time, "processor time")
    return Device(torch.cuda.get_device_name(), "bfloat16", 16, time.perf_counter, "time")


def start(checkpoint: Path, on: Device, *, asynchronous: bool) -> Any:
    """An engine with its core in this process, with the recorder."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine
    from vllm.v1.executor.abstract import Executor

    from harness.backends.vllm import started

    kind = started.Kind(checkpoint, on.dtype, on.block_size, made_up=False, async_scheduling=asynchronous)
    plain_attention = started.needs_plain_attention(kind)
    arguments = EngineArgs(
        model=str(checkpoint),
        dtype=on.dtype,
        max_model_len=512,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=1024,
        block_size=on.block_size,
        attention_backend=started.attention_backend(plain=plain_attention),
        enforce_eager=on.name == "cpu",
        gpu_memory_utilization=started.GPU_MEMORY_UTILIZATION,
        skip_tokenizer_init=True,
        generation_config="vllm",
        async_scheduling=asynchronous,
        scheduler_cls=f"harness.backends.vllm.{'AsyncRecorder' if asynchronous else 'Recorder'}",
        disable_log_stats=True,
    )
    config = arguments.create_engine_config()
    config.scheduler_config.async_scheduling = asynchronous  # the CPU platform switches it off
    return LLMEngine(vllm_config=config, executor_class=Executor.get_class(config), log_stats=False, multiprocess_mode=False)


def plain_scheduler(core: Any) -> Any:
    """vLLM's own, made as its core made the recorder."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler

    core.vllm_config.cache_config.num_gpu_blocks = core.scheduler.kv_cache_config.num_blocks  # not kept once the engine stands
    return (AsyncScheduler if core.async_scheduling else Scheduler)(
        vllm_config=core.vllm_config,
        kv_cache_config=core.scheduler.kv_cache_config,
        structured_output_manager=core.structured_output_manager,
        block_size=core.scheduler.block_size,
        hash_block_size=core.scheduler.block_size,
        log_stats=False,
    )


def serve(core: Any, scheduler: Any, number: int, tokens: int, clock: Callable[[], float]) -> Slice:
    """One slice: 32 requests that nobody has sent before, from the first step to the last."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    core.scheduler = scheduler
    for place in range(REQUESTS):
        request = EngineCoreRequest(
            request_id=f"{number}-{place}",
            prompt_token_ids=[16 + (number * REQUESTS + place + position) % 200 for position in range(PROMPT)],
            mm_features=None,
            sampling_params=SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        core.add_request(*core.preprocess_add_request(request))
    began, steps = clock(), 0
    while scheduler.has_requests() or core.batch_queue:
        core.step_fn()
        steps += 1
    return Slice(clock() - began, steps)


def compare(checkpoint: Path, folder: str, tokens: int, *, asynchronous: bool) -> None:
    os.environ["CAESURA_LOG"] = folder
    on = device()
    llm = start(checkpoint, on, asynchronous=asynchronous)
    core = llm.engine_core.engine_core
    recorded, plain, numbers = core.scheduler, plain_scheduler(core), count()
    pairs: list[tuple[Slice, Slice]] = []
    for place in range(max(12, TOKENS_IN_ALL // tokens) + 1):
        order = (plain, recorded) if place % 2 else (recorded, plain)
        slices = {id(scheduler): serve(core, scheduler, next(numbers), tokens, on.clock) for scheduler in order}
        if place:  # the first warms up
            pairs.append((slices[id(plain)], slices[id(recorded)]))
    core.shutdown()
    written = sum(file.stat().st_size for file in Path(folder).glob("*/*"))
    scheduling = "asynchronous" if asynchronous else "synchronous"
    print(f"vLLM {installed().version} on {on.name}, {scheduling}, {checkpoint.name}, {REQUESTS} requests at a time, {tokens} tokens each")
    report(pairs, REQUESTS * tokens, written, on.time)


def report(pairs: list[tuple[Slice, Slice]], tokens: int, written: int, kind_of_time: str) -> None:
    print(f"{len(pairs)} pairs of slices, {kind_of_time}")
    for name, slices in (("without", [without for without, _ in pairs]), ("with", [recorded for _, recorded in pairs])):
        rate = statistics.median(tokens / one.seconds for one in slices)
        step_ms = statistics.median(one.seconds / one.steps for one in slices) * 1e3
        print(f"{name:8} {rate:8.0f} tokens/s, a step {step_ms:.2f} ms")
    first, median, third = statistics.quantiles([without.seconds / recorded.seconds for without, recorded in pairs], n=4)
    print(f"with / without: median {median:.3f}, quartiles {first:.3f} and {third:.3f}")
    added = statistics.median((recorded.seconds - without.seconds) / recorded.steps for without, recorded in pairs)
    print(f"added   {added * 1e3:9.3f} ms a step")
    print(f"written {written / (tokens * (len(pairs) + 1)):9.1f} bytes a token")


def main() -> None:
    prepare_environment()
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint", nargs="?", default="smollm2")
    parser.add_argument("--async", action="store_true", dest="asynchronous")
    parser.add_argument("--tokens", type=int, default=32)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compare(ensure(asked.checkpoint), folder, asked.tokens, asynchronous=asked.asynchronous)


if __name__ == "__main__":
    main()
