"""What the recorder costs a server: tokens a second of AsyncLLM with it and without, in one run.

    python benchmarks/recorder_overhead.py [CHECKPOINT]

Two engines stand side by side, one with vLLM's own scheduler and one with the recorder, and serve the same 32 requests at a
time in turns, so that what else the machine does meets both alike. A round's figure is the ratio of the two; medians.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from harness.backends.vllm.install import installed, prepare_environment
from harness.checkpoints import ensure

REQUESTS, TOKENS, ROUNDS = 32, 64, 5
RECORDED = "harness.backends.vllm.Recorder"


def start(checkpoint: Path, scheduler_cls: str | None):
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(checkpoint),
            dtype="float32",
            max_model_len=512,
            max_num_seqs=REQUESTS,
            max_num_batched_tokens=1024,
            block_size=32,
            enforce_eager=True,
            skip_tokenizer_init=True,
            generation_config="vllm",
            async_scheduling=False,
            scheduler_cls=scheduler_cls,
            disable_log_stats=True,
        )
    )


async def serve(llm, round: int) -> float:
    """Tokens a second."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA)

    async def one(number: int) -> int:
        prompt = {"prompt_token_ids": [16 + (number + place + round) % 200 for place in range(32)]}
        return sum([len(output.outputs[0].token_ids) async for output in llm.generate(prompt, params, f"{round}-{number}")])

    began = time.perf_counter()
    tokens = sum(await asyncio.gather(*map(one, range(REQUESTS))))
    return tokens / (time.perf_counter() - began)


async def compare(checkpoint: Path, folder: str) -> None:
    os.environ["CAESURA_LOG"] = folder
    plain, recorded = start(checkpoint, None), start(checkpoint, RECORDED)
    rates: list[tuple[float, float]] = []
    for round in range(ROUNDS + 1):
        engines = (plain, recorded) if round % 2 else (recorded, plain)
        rate = {id(llm): await serve(llm, round) for llm in engines}
        if round:  # the first warms up
            rates.append((rate[id(plain)], rate[id(recorded)]))
    for llm in (plain, recorded):
        llm.shutdown()
    written = sum(file.stat().st_size for file in Path(folder).glob("*/*"))
    print(f"vLLM {installed().version}, {checkpoint.name}, {REQUESTS} requests at a time, {TOKENS} tokens each, {ROUNDS} rounds")
    print(f"without  {statistics.median(plain for plain, _ in rates):8.0f} tokens/s")
    print(f"with     {statistics.median(recorded for _, recorded in rates):8.0f} tokens/s")
    ratios = sorted(recorded / plain for plain, recorded in rates)
    print(f"with / without: median {statistics.median(ratios):.3f}, of {ratios[0]:.3f} to {ratios[-1]:.3f}")
    print(f"written  {written / (REQUESTS * TOKENS * (ROUNDS + 1)):8.1f} bytes a token")


def main() -> None:
    prepare_environment()
    checkpoint = ensure(sys.argv[1] if len(sys.argv) > 1 else "smollm2")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(compare(checkpoint, folder))


if __name__ == "__main__":
    main()
