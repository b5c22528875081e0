"""Hours in minutes: random traffic on an engine that runs by itself, paused, aborted, updated and hung up on all the while.

    python property_tests/soak.py [--minutes 30] [--seed 0] [--in-process]

Fails if a request does not end, ends without a reason or with tokens missing, if a call does not return, if at the end a block
is not free or a request not forgotten, or if memory grew between the second quarter of the time and the last.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from engine import AsyncLLM, CompletionOutput, Conflict, EngineConfig, PauseSuperseded, SamplingParams
from engine.process import ProcessConnection
from harness.checkpoints import ensure, make_tiny

CLIENTS = 8
HANG_S = 120
"""No call and no running request takes nearly so long, on a busy machine either."""
GROWTH = 0.05
"""More memory than so much of what there was is a leak."""

SHAPE: dict[str, Any] = {
    "block_size": 8,
    "num_blocks": 40,
    "max_model_len": 256,
    "max_num_seqs": 6,
    "max_num_batched_tokens": 48,
    "host_blocks": 16,
}
"""Small enough that requests are chunked, preempted, and wait."""


class Soak:
    """One engine, its clients and its trainer, until the time is over."""

    def __init__(self, llm: AsyncLLM, folders: list[Path], seed: int, until: float) -> None:
        self.llm = llm
        self.counts: Counter[str] = Counter()
        self._folders = folders
        self._random = random.Random(seed)
        self._until = until
        self._num_requests = 0
        self._aborts = 0
        """Pauses and calls so far that may have ended any request."""

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._until

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            trainers = [tasks.create_task(self._train()) for _ in range(2)]
            for _ in range(CLIENTS):
                tasks.create_task(self._be_a_client())
            await asyncio.wait(trainers)
            await self.llm.resume_generation()

    async def _be_a_client(self) -> None:
        while not self.over:
            async with asyncio.timeout(HANG_S):
                await self._request()

    async def _request(self) -> None:
        self._num_requests += 1
        request_id, draw, aborts = f"r{self._num_requests}", self._random, self._aborts
        prompt = [draw.randrange(16, 256) for _ in range(draw.choice((3, 20, 60)))]
        params = SamplingParams(
            max_tokens=draw.choice((1, 8, 60)),
            temperature=draw.choice((0.0, 1.0)),
            n=draw.choice((1, 1, 1, 3)),
            ignore_eos=True,
            output_kind="delta",
        )
        patience = draw.choice((None, None, None, 2))  # so many outputs, then the client hangs up
        tokens: Counter[int] = Counter()
        generator = self.llm.generate(prompt, params, request_id)
        async for output in generator:
            for completion in output.outputs:
                tokens[completion.index] += len(completion.token_ids)
                self.counts["tokens"] += len(completion.token_ids)
                if completion.finish_reason is not None:
                    self._check_end(completion, tokens[completion.index], params, may_abort=self._aborts > aborts)
            if patience is not None and (patience := patience - 1) == 0:
                await generator.aclose()
                self.counts["hung up"] += 1
                return
        assert output.finished and len(tokens) == params.n, f"{request_id} ended without all of its {params.n} sequences: {output}"

    def _check_end(self, completion: CompletionOutput, num_tokens: int, params: SamplingParams, *, may_abort: bool) -> None:
        assert completion.finish_reason is not None and completion.weight_versions is not None
        self.counts[completion.finish_reason] += 1
        if completion.finish_reason == "length":
            assert num_tokens == params.max_tokens, f"{num_tokens} of {params.max_tokens} tokens: {completion}"
        else:
            assert completion.finish_reason == "abort" and may_abort, f"nobody asked for this end: {completion}"
        ends = [0, *(span.end for span in completion.weight_versions)]
        assert [span.start for span in completion.weight_versions] == ends[:-1] and ends[-1] == num_tokens, f"spans: {completion}"

    async def _train(self) -> None:
        """Two of these meet each other's pauses."""
        while not self.over:
            async with asyncio.timeout(HANG_S):
                await asyncio.sleep(self._random.random())
                await self._random.choice((self._update, self._update, self._sleep, self._abort, self._pause_and_resume))()

    async def _pause(self, mode) -> bool:
        """Whether it took effect before somebody overrode it."""
        self._aborts += mode == "abort"
        self.counts[f"pause({mode})"] += 1
        try:
            await self.llm.pause_generation(mode=mode, clear_cache=self._random.random() < 0.5)
        except PauseSuperseded:
            self.counts["superseded"] += 1
        except Conflict:
            if mode != "wait":  # over the other trainer's sleep or session a `wait` alone is refused
                raise
            self.counts["refused"] += 1
        else:
            return True
        return False

    async def _pause_and_resume(self) -> None:
        await self._pause(self._random.choice(("abort", "wait", "keep")))
        await self._unless_refused(self.llm.resume_generation())

    async def _update(self) -> None:
        if await self._pause(self._random.choice(("keep", "keep", "abort"))):
            self.counts["updates"] += await self._unless_refused(
                self.llm.load_weights(self._random.choice(self._folders), f"v{self.counts['updates']}")
            )
        await self._unless_refused(self.llm.resume_generation())

    async def _sleep(self) -> None:
        self.counts["sleeps"] += await self._unless_refused(self.llm.sleep(1, "keep"))
        await self.llm.wake_up()
        await self._unless_refused(self.llm.resume_generation())

    async def _abort(self) -> None:
        self._aborts += 1
        self.counts["aborted"] += await self.llm.abort([f"r{self._num_requests - back}" for back in range(3)])

    async def _unless_refused(self, call) -> bool:
        """Whether it was carried out; the other trainer's pause, sleep or session may stand against it."""
        with suppress(Conflict, PauseSuperseded):
            await call
            return True
        self.counts["refused"] += 1
        return False


async def memory_mb(pids: list[int], samples: list[float], seconds: float) -> None:
    """Samples what the processes hold, until cancelled."""
    while True:
        await asyncio.sleep(seconds)
        listing = subprocess.run(["ps", "-o", "rss=", "-p", ",".join(map(str, pids))], capture_output=True, text=True, check=True)
        samples.append(sum(map(int, listing.stdout.split())) / 1024)


async def soak(arguments: argparse.Namespace, other: Path) -> str | None:
    """Returns: what went wrong."""
    folders = [ensure("tiny"), other]
    config = EngineConfig(checkpoint=folders[0], async_scheduling=True, **SHAPE)
    llm = AsyncLLM.from_config(config, in_process=arguments.in_process)
    pids = [os.getpid()] + ([llm._connection.pid] if isinstance(llm._connection, ProcessConnection) else [])
    samples: list[float] = []
    sampling = asyncio.create_task(memory_mb(pids, samples, arguments.minutes * 60 / 120))
    run = Soak(llm, folders, arguments.seed, time.monotonic() + arguments.minutes * 60)
    await run.run()
    sampling.cancel()
    counters = await llm.counters()
    llm.shutdown()
    quarter = len(samples) // 4
    before, after = statistics.median(samples[quarter : 2 * quarter]), statistics.median(samples[-quarter:])
    print(", ".join(f"{name} {count:,}" for name, count in sorted(run.counts.items())))
    print(f"preemptions {counters.preemptions:,}; memory {before:.0f} MB in the second quarter, {after:.0f} MB in the last")
    if (counters.running, counters.waiting, counters.free_blocks) != (0, 0, counters.num_blocks):
        return f"at the end something is left: {counters}"
    if after > before * (1 + GROWTH):
        return f"memory grew from {before:.0f} to {after:.0f} MB, by more than {GROWTH:.0%}"
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description="Random traffic, pauses, aborts, updates and disconnects on a live engine.")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--in-process", action="store_true", help="the core in a thread")
    arguments = parser.parse_args()
    print(f"soak of {arguments.minutes:g} minutes, seed {arguments.seed}", flush=True)
    with TemporaryDirectory() as folder:
        make_tiny(Path(folder) / "other", seed=1)
        wrong = asyncio.run(soak(arguments, Path(folder) / "other"))
    print("FAILED: " + wrong if wrong else "nothing lost, every block free, memory flat")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
