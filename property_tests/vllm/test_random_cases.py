"""Whatever is asked of vLLM and in whatever order, the model under its profile explains it, what it breaks has a file in
scenarios/differences, and no case leaves a trace in the next."""

from __future__ import annotations

import pytest

from harness.backends import make_backend
from harness.events import Returned
from harness.fuzz.case import ENDS, Case, Signature, run_case
from harness.fuzz.generate import case_of
from harness.fuzz.hunt import Settings
from harness.fuzz.recall import recall
from harness.operations import Prompt, Submit
from harness.scenario import EngineShape

from .differences import DIFFERENCES, unreported

ENGINE_SHAPE = {
    "block_size": 4,
    "num_blocks": 12,
    "max_model_len": 40,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 16,
    "prefix_caching": True,
}
"""One shape for all cases of the real engine: another one may need another engine, which takes a second to start."""
ENGINE_VERBS = frozenset(
    ("submit", "abort", "pause", "resume", "step", "advance", "is_paused", "reset_prefix_cache", "swap_weights", "update_weight_version")
)
"""What the real engine survives: a step in an open weight session is the end of it (docs/vllm.md)."""
SCHEDULER_VERBS = ENGINE_VERBS | {"start_weight_update", "update_weights", "finish_weight_update"}

both_ways_of_scheduling = pytest.mark.parametrize("async_scheduling", [False, True], ids=["sync", "async"])


@pytest.fixture
def counts(request):
    long = request.config.getoption("--long", default=False)
    return {"vllm-scheduler": 20_000 if long else 250, "vllm": 1_000 if long else 20}


@pytest.fixture(scope="module")
def known():
    """What the files of scenarios/differences show."""
    backend = make_backend("vllm-scheduler")
    return {one.signature for file in DIFFERENCES for one in recall(str(file), backend, Settings())}


def unknown(name, cases, known, *, verbs, **shape):
    """Cases that the model does not explain, in which a call raised, or that break a promise in a way that no file shows."""
    backend, found = make_backend(name), []
    for seed in range(cases):
        outcome = run_case(case_of(seed, engine=shape, verbs=verbs), backend)
        # The next step over weights that are half-written, or not there, is the end of the engine.
        died = outcome.ended == "failed" and outcome.finding("atomic-commit") is not None
        expected = unreported(outcome.entries[0].event.profile) | ({ENDS} if died else set())
        found += [(seed, one) for one in outcome.findings if one.id not in expected and Signature.of(one) not in known]
    return found


@both_ways_of_scheduling
def test_the_scheduler_does_nothing_that_is_not_known(async_scheduling, counts, known, needs_vllm):
    assert unknown("vllm-scheduler", counts["vllm-scheduler"], known, verbs=SCHEDULER_VERBS, async_scheduling=async_scheduling) == []


@both_ways_of_scheduling
def test_the_engine_does_nothing_that_is_not_known(async_scheduling, counts, known, needs_vllm):
    shape = {**ENGINE_SHAPE, "async_scheduling": async_scheduling}
    assert unknown("vllm", counts["vllm"], known, verbs=ENGINE_VERBS, **shape) == []


@both_ways_of_scheduling
def test_a_case_leaves_no_trace_in_the_next(async_scheduling, needs_vllm):
    backend = make_backend("vllm-scheduler")
    shape = {"async_scheduling": async_scheduling}
    alone = run_case(case_of(3, engine=shape, verbs=SCHEDULER_VERBS), backend).entries
    for seed in range(20, 30):
        run_case(case_of(seed, engine=shape, verbs=SCHEDULER_VERBS), backend)
    assert run_case(case_of(3, engine=shape, verbs=SCHEDULER_VERBS), backend).entries == alone


def test_a_case_has_its_own_max_model_len_in_the_front_end_too(needs_vllm):
    backend = make_backend("vllm-scheduler")
    prompt = Submit(id="r1", prompt=Prompt(tokens=30), max_tokens=2)
    refused = []
    for longest in (64, 16, 64):
        shape = EngineShape(block_size=4, num_blocks=32, max_model_len=longest)
        entries = run_case(Case(engine=shape, operations=(prompt,)), backend).entries
        refused += [entry.event.error is not None for entry in entries if isinstance(entry.event, Returned) and entry.event.op == 0]
    assert refused == [False, True, False]
