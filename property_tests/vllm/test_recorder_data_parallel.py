"""Two data-parallel ranks behind one AsyncLLM, each with the recorder: every pause mode with new weights, both logs in one folder.

Dense ranks run by themselves. Those of a mixture of experts step together, in waves, and agree on a pause; a dense checkpoint that is
said to have experts makes vLLM use that engine core.
"""

from __future__ import annotations

import asyncio

import pytest

from harness.checkpoints import ensure
from harness.events import Launched, Opened, PauseEffective, Resumed
from harness.log import read_log
from harness.trial import review

from .differences import BROKEN, violated

EXPERTS = pytest.mark.parametrize("experts", [0, 4], ids=["dense", "in waves"])
ROUNDS = [(mode, clear) for mode in ("keep", "wait", "abort") for clear in (True, False)]
MEETINGS = [("wait", "keep"), ("keep", "wait"), ("wait", "abort"), ("keep", "abort")]


async def generate(llm, name):
    """Why it ended."""
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    async for output in llm.generate({"prompt_token_ids": list(range(20, 36))}, params, name):
        last = output
    return last.outputs[0].finish_reason


def start(llm, name):
    return [asyncio.create_task(generate(llm, f"{name}-{place}")) for place in range(6)]


async def train(llm, checkpoint):
    """Every pause mode with new weights, with a clear and without."""
    for number, (mode, clear_cache) in enumerate(ROUNDS):
        requests = start(llm, f"r{number}")
        await asyncio.sleep(0.2)
        await llm.pause_generation(mode=mode, clear_cache=clear_cache)
        await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint)})
        await llm.update_weight_version(f"v{number}")
        await llm.resume_generation()
        reasons = set(await asyncio.gather(*requests))
        assert reasons <= ({"length", "abort"} if mode == "abort" else {"length"})


async def collide(llm, checkpoint):
    """Pauses meet, and resumes come before they have returned, which ranks that step together refuse."""
    for number, (first, second) in enumerate(MEETINGS):
        requests = start(llm, f"r{number}")
        await asyncio.sleep(0.1)
        calls = [llm.pause_generation(mode=first), llm.pause_generation(mode=second, clear_cache=False), llm.resume_generation()]
        await asyncio.gather(*calls, return_exceptions=True)
        await llm.resume_generation()
        await asyncio.gather(*requests)


@pytest.fixture
def run(needs_vllm, tmp_path, monkeypatch, request):
    if not request.config.getoption("--long", default=False):
        pytest.skip("with --long: two engines take most of a minute to start")
    monkeypatch.setenv("CAESURA_LOG", str(tmp_path))
    from harness.backends.vllm import live_worker
    from harness.backends.vllm.install import prepare_environment

    prepare_environment()
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    monkeypatch.setenv(live_worker.PLAIN_ATTENTION, "1")

    async def drive(config, client, checkpoint):
        from vllm.v1.engine.async_llm import AsyncLLM
        from vllm.v1.executor.abstract import Executor

        llm = AsyncLLM(vllm_config=config, executor_class=Executor.get_class(config), log_stats=False)
        try:
            await client(llm, checkpoint)
        finally:
            llm.shutdown()

    def run(client, experts):
        from vllm.engine.arg_utils import AsyncEngineArgs

        checkpoint = ensure("tiny")
        config = AsyncEngineArgs(
            model=str(checkpoint),
            dtype="float32",
            block_size=32,
            max_model_len=128,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            num_gpu_blocks_override=33,
            enforce_eager=True,
            skip_tokenizer_init=True,
            generation_config="vllm",
            async_scheduling=False,
            data_parallel_size=2,
            scheduler_cls="harness.backends.vllm.Recorder",
            worker_extension_cls="harness.backends.vllm.live_worker.Extension",
            hf_overrides={"num_experts": experts} if experts else {},
        ).create_engine_config()
        asyncio.run(drive(config, client, checkpoint))
        (folder,) = tmp_path.iterdir()
        return read_log(folder)

    return run


def of_rank(log, writer, kind):
    return [entry.event for entry in log.entries if entry.writer == writer and isinstance(entry.event, kind)]


@EXPERTS
def test_ranks_are_explained_each_and_hold(run, experts):
    log = run(train, experts)
    assert log.closed
    for writer in ("r0", "r1"):
        (opened,) = of_rank(log, writer, Opened)
        assert (opened.level, opened.profile.endswith("-waves")) == (2, bool(experts))
        assert len(of_rank(log, writer, PauseEffective)) == len(of_rank(log, writer, Resumed)) == len(ROUNDS)
        assert of_rank(log, writer, Launched)
    trial = review(log, None)
    assert trial.verdict.status == "holds", trial.verdict.reasons
    assert trial.verdict.explanation is not None and trial.verdict.explanation.mismatch is None


@EXPERTS
def test_where_pauses_meet_ranks_are_explained_each_and_break_what_one_engine_breaks(run, experts):
    # The last resume may begin a wave, in which a rank waits for one that has shut down, and is killed: its log then has no end.
    log = run(collide, experts)
    trial = review(log, None)
    explanation = trial.verdict.explanation
    assert explanation is not None and explanation.mismatch is None, explanation
    assert violated(trial) <= BROKEN
