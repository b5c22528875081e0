"""Whatever is asked of vLLM and in whatever order, the model under its profile explains it, and no case leaves a trace in the next."""

from __future__ import annotations

import pytest

from harness.backends import make_backend
from harness.fuzz.case import API_TRUTH, CONFORMANCE, run_case
from harness.fuzz.generate import case_of

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


@pytest.fixture
def counts(request):
    long = request.config.getoption("--long", default=False)
    return {"vllm-scheduler": 20_000 if long else 500, "vllm": 1_000 if long else 20}


def unexplained(name, cases, **given):
    """Cases that the model does not explain, or in which a call raised."""
    backend, found = make_backend(name), []
    for seed in range(cases):
        outcome = run_case(case_of(seed, **given), backend)
        if outcome.finding(CONFORMANCE) or outcome.ended in ("died", "hung"):
            found.append((seed, outcome.finding(CONFORMANCE) or outcome.finding(API_TRUTH)))
    return found


def test_the_model_explains_the_scheduler(counts, needs_vllm):
    assert unexplained("vllm-scheduler", counts["vllm-scheduler"]) == []


def test_the_model_explains_the_engine(counts, needs_vllm):
    assert unexplained("vllm", counts["vllm"], engine=ENGINE_SHAPE, verbs=ENGINE_VERBS) == []


def test_a_case_leaves_no_trace_in_the_next(needs_vllm):
    backend = make_backend("vllm-scheduler")
    alone = run_case(case_of(3), backend).entries
    for seed in range(20, 30):
        run_case(case_of(seed), backend)
    assert run_case(case_of(3), backend).entries == alone
