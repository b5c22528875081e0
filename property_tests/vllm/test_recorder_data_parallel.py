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

ROUNDS = [(mode, clear) for mode in ("keep", "wait", "abort") for clear in (True, False)]


async def train(config, checkpoint):
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.executor.abstract import Executor

    llm = AsyncLLM(vllm_config=config, executor_class=Executor.get_class(config), log_stats=False)
    try:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)

        async def one(name):
            async for output in llm.generate({"prompt_token_ids": list(range(20, 36))}, params, name):
                last = output
            return last.outputs[0].finish_reason

        for number, (mode, clear_cache) in enumerate(ROUNDS):
            tasks = [asyncio.create_task(one(f"r{number}-{place}")) for place in range(6)]
            await asyncio.sleep(0.2)
            await llm.pause_generation(mode=mode, clear_cache=clear_cache)
            await llm.collective_rpc("reload_weights", kwargs={"weights_path": str(checkpoint)})
            await llm.update_weight_version(f"v{number}")
            await llm.resume_generation()
            reasons = set(await asyncio.gather(*tasks))
            assert reasons <= ({"length", "abort"} if mode == "abort" else {"length"})
        await collide(llm, one)
    finally:
        llm.shutdown()


async def collide(llm, one):
    """Pauses meet, and resumes come before they have returned, which ranks that step together refuse."""
    for number, (first, second) in enumerate([("wait", "keep"), ("keep", "wait"), ("wait", "abort"), ("keep", "abort")]):
        tasks = [asyncio.create_task(one(f"c{number}-{place}")) for place in range(6)]
        await asyncio.sleep(0.1)
        calls = [llm.pause_generation(mode=first), llm.pause_generation(mode=second, clear_cache=False), llm.resume_generation()]
        await asyncio.gather(*calls, return_exceptions=True)
        await llm.resume_generation()
        await asyncio.gather(*tasks)


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

    def run(**fields):
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
            **fields,
        ).create_engine_config()
        asyncio.run(train(config, checkpoint))
        (folder,) = tmp_path.iterdir()
        return read_log(folder)

    return run


def of_rank(log, writer, kind):
    return [entry.event for entry in log.entries if entry.writer == writer and isinstance(entry.event, kind)]


@pytest.mark.parametrize("experts", [0, 4], ids=["dense", "in waves"])
def test_ranks_are_explained_each(run, experts):
    log = run(hf_overrides={"num_experts": experts} if experts else {})
    assert log.closed
    for writer in ("r0", "r1"):
        (opened,) = of_rank(log, writer, Opened)
        assert (opened.level, opened.profile.endswith("-waves")) == (2, bool(experts))
        assert len(of_rank(log, writer, PauseEffective)) >= len(ROUNDS) <= len(of_rank(log, writer, Resumed))
        assert of_rank(log, writer, Launched)
    trial = review(log, None)
    explanation = trial.verdict.explanation
    assert explanation is not None and explanation.mismatch is None, explanation
    assert violated(trial) <= BROKEN
