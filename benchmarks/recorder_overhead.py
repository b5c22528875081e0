"""What the recorder costs a server: tokens a second of vLLM's engine core with it and without, in one process.

    python benchmarks/recorder_overhead.py [CHECKPOINT]

One engine core with two schedulers, vLLM's own and the recorder. It serves the same 32 requests in short slices, with one and with the
other in turns, so that what else the machine does meets both alike. A pair of slices gives a ratio; time is that of the processor,
which counts nothing but this process. Medians, with the quartiles of the ratio.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from harness.backends.vllm.install import installed, prepare_environment
from harness.checkpoints import ensure

REQUESTS, PROMPT, TOKENS, PAIRS = 32, 4, 32, 40


class Slice(NamedTuple):
    """What serving the requests once took."""

    cpu_s: float
    steps: int


def start(checkpoint: Path) -> Any:
    """An engine with its core in this process, with the recorder."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    from harness.backends.vllm import started

    kind = started.Kind(checkpoint, "float32", 32, made_up=False, async_scheduling=False)
    plain_attention = started.needs_plain_attention(kind)
    arguments = EngineArgs(
        model=str(checkpoint),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=REQUESTS,
        max_num_batched_tokens=1024,
        block_size=32,
        attention_backend=started.attention_backend(plain=plain_attention),
        enforce_eager=True,
        skip_tokenizer_init=True,
        generation_config="vllm",
        async_scheduling=False,
        scheduler_cls="harness.backends.vllm.Recorder",
        disable_log_stats=True,
    )
    return LLMEngine.from_engine_args(arguments)


def plain_scheduler(core: Any) -> Any:
    """vLLM's own, made as its core made the recorder."""
    from vllm.v1.core.sched.scheduler import Scheduler

    core.vllm_config.cache_config.num_gpu_blocks = core.scheduler.kv_cache_config.num_blocks  # not kept once the engine stands
    return Scheduler(
        vllm_config=core.vllm_config,
        kv_cache_config=core.scheduler.kv_cache_config,
        structured_output_manager=core.structured_output_manager,
        block_size=core.scheduler.block_size,
        hash_block_size=core.scheduler.block_size,
        log_stats=False,
    )


def serve(core: Any, scheduler: Any, number: int) -> Slice:
    """One slice: 32 requests that nobody has sent before, from the first step to the last."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    core.scheduler = scheduler
    for place in range(REQUESTS):
        request = EngineCoreRequest(
            request_id=f"{number}-{place}",
            prompt_token_ids=[16 + (number * REQUESTS + place + position) % 200 for position in range(PROMPT)],
            mm_features=None,
            sampling_params=SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        core.add_request(*core.preprocess_add_request(request))
    began, steps = time.process_time(), 0
    while scheduler.has_requests():
        core.step_fn()
        steps += 1
    return Slice(time.process_time() - began, steps)


def compare(checkpoint: Path, folder: str) -> None:
    os.environ["CAESURA_LOG"] = folder
    llm = start(checkpoint)
    core = llm.engine_core.engine_core
    recorded, plain, numbers = core.scheduler, plain_scheduler(core), count()
    pairs: list[tuple[Slice, Slice]] = []
    for place in range(PAIRS + 1):
        order = (plain, recorded) if place % 2 else (recorded, plain)
        slices = {id(scheduler): serve(core, scheduler, next(numbers)) for scheduler in order}
        if place:  # the first warms up
            pairs.append((slices[id(plain)], slices[id(recorded)]))
    core.shutdown()
    written = sum(file.stat().st_size for file in Path(folder).glob("*/*"))
    report(checkpoint, pairs, written)


def report(checkpoint: Path, pairs: list[tuple[Slice, Slice]], written: int) -> None:
    tokens = REQUESTS * TOKENS
    print(
        f"vLLM {installed().version}, {checkpoint.name}, {REQUESTS} requests at a time, {TOKENS} tokens each, {len(pairs)} pairs of slices"
    )
    for name, slices in (("without", [without for without, _ in pairs]), ("with", [recorded for _, recorded in pairs])):
        rate = statistics.median(tokens / one.cpu_s for one in slices)
        step_ms = statistics.median(one.cpu_s / one.steps for one in slices) * 1e3
        print(f"{name:8} {rate:8.0f} tokens/s, a step {step_ms:.2f} ms")
    first, median, third = statistics.quantiles([without.cpu_s / recorded.cpu_s for without, recorded in pairs], n=4)
    print(f"with / without: median {median:.3f}, quartiles {first:.3f} and {third:.3f}")
    added = statistics.median((recorded.cpu_s - without.cpu_s) / recorded.steps for without, recorded in pairs)
    print(f"added   {added * 1e3:9.3f} ms a step")
    print(f"written {written / (tokens * (len(pairs) + 1)):9.1f} bytes a token")


def main() -> None:
    prepare_environment()
    checkpoint = ensure(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
    with tempfile.TemporaryDirectory() as folder:
        compare(checkpoint, folder)


if __name__ == "__main__":
    main()
