"""Asynchronous scheduling, sleep and the host tier on a CUDA device: a launch waits for nothing, and memory really comes back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from harness.fuzz.case import run_case
from harness.fuzz.generate import case_of
from harness.scenario import load_scenario
from harness.trial import run_trial

pytest.importorskip("torch")

import torch

from engine import EngineConfig, EngineCore, SamplingParams
from harness.backends.torch import TorchBackend
from harness.checkpoints import ensure

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device")]

FILES = sorted((Path(__file__).parents[2] / "scenarios" / "modes").glob("*.yaml"))
SAMPLED = {"temperature": 1.3, "top_p": 0.9, "top_k": 50, "min_p": 0.01, "seed": 7, "logprobs": 3}


def engine(**fields) -> EngineCore:
    shape = {"block_size": 4, "num_blocks": 24, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 32}
    config = EngineConfig(checkpoint=ensure("tiny"), device="cuda", **{**shape, "async_scheduling": True, **fields})
    core = EngineCore(config)
    for number, params in enumerate(({}, SAMPLED, {}, SAMPLED)):
        core.submit(f"r{number}", range(20 + number, 33 + number), SamplingParams(max_tokens=24, ignore_eos=True, **params))
    return core


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("host_blocks", [0, 8])
def test_a_step_is_launched_beside_the_one_in_flight_without_waiting_for_the_device(host_blocks: int) -> None:
    core = engine(host_blocks=host_blocks)
    beside = 0
    while core.has_work():
        if core.launch_due:
            in_flight = bool(core._flights)
            with waiting_is_an_error() if in_flight else nullcontext():
                core.launch()
            beside += in_flight
        if core.landing_due:
            core.land()
    assert beside > 20
    assert sum(len(output.token_ids) for output in core.take_outputs()) == 4 * 24


def test_sleep_gives_the_device_its_memory_back_and_the_weights_wake_as_they_were() -> None:
    core = engine()
    before = core.weight_checksums()
    held = sum(memory.num_bytes for memory in core.runner.memory.values())
    allocated = torch.cuda.memory_allocated()
    ticket = core.begin_sleep(1, "keep")
    while not ticket.done:
        core.step()
        core.take_outputs()
        core.pause_complete()
    assert torch.cuda.memory_allocated() <= allocated - held
    core.wake_up()
    assert core.weight_checksums() == before
    while core.has_work():
        core.step()
    assert sum(len(output.token_ids) for output in core.take_outputs()) > 0


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_a_scenario_holds_with_a_step_in_flight(file: Path, tmp_path: Path) -> None:
    scenario = load_scenario(file)
    shape = scenario.engine.model_copy(update={"device": "cuda", "checkpoint": "tiny", "async_scheduling": True})
    # What a file is to reach is known of a synchronous engine.
    expect = scenario.expect.model_copy(update={"reaches": ()})
    backend = TorchBackend()
    info = backend.start(shape)
    trial = run_trial(replace(scenario, engine=shape, expect=expect), backend, info, tmp_path, explain=True)
    backend.stop()
    assert trial.verdict.status == "holds", trial.verdict


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_the_model_explains_random_cases_with_a_step_in_flight(first: int) -> None:
    for seed in range(first, first + 20):
        outcome = run_case(case_of(seed, engine={"device": "cuda", "async_scheduling": True}), TorchBackend())
        assert outcome.clean, (seed, outcome.findings)
