"""Greedy tokens of the engine are those of transformers' own `generate`, however the work is batched, cut and preempted."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import SamplingParams

PROMPTS = {
    "a": [11, 12, 13, 14, 15],
    "b": [(7 * i) % 500 for i in range(17)],
    "c": [(13 * i) % 500 for i in range(30)],
    "d": [(7 * i) % 500 for i in range(14)],  # shares three blocks with b
}
MAX_TOKENS = 16

SHAPES = {
    "all at once": {"max_num_batched_tokens": 128},
    "chunked prefill": {"max_num_batched_tokens": 5},
    "one at a time": {"max_num_seqs": 1},
    "preemption": {"num_blocks": 13},
    "no prefix caching": {"prefix_caching": False},
    "blocks of one token": {"block_size": 1, "num_blocks": 128},
    "odd blocks and chunks": {"block_size": 7, "long_prefill_token_threshold": 3},
}


@pytest.fixture(scope="module")
def expected(checkpoint):
    """Tokens of transformers' own generation, by model and request."""
    tokens = {}
    for kind, tied in (("qwen3", False), ("llama", True)):
        model = AutoModelForCausalLM.from_pretrained(checkpoint(kind, tied=tied))
        for request_id, prompt in PROMPTS.items():
            ids = torch.tensor([prompt])
            output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=MAX_TOKENS, do_sample=False)
            tokens[kind, request_id] = output[0, len(prompt) :].tolist()
    return tokens


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "tied"), [("qwen3", False), ("llama", True)])
def test_tokens_equal_those_of_transformers(make_engine, checkpoint, drain, recorder, expected, kind, tied, shape):
    engine = make_engine(observer=recorder, checkpoint=checkpoint(kind, tied=tied), **SHAPES[shape])
    for request_id, prompt in PROMPTS.items():
        engine.submit(request_id, prompt, SamplingParams(max_tokens=MAX_TOKENS))
    assert drain(engine) == {request_id: expected[kind, request_id] for request_id in PROMPTS}
    assert engine.scheduler.pool.num_free == engine.config.num_blocks
    if shape == "preemption":
        assert any(line.startswith("preempted") for line in recorder.log)


def test_a_prefix_hit_in_the_step_that_writes_it_reads_what_was_written(make_engine, drain, recorder, expected):
    engine = make_engine(observer=recorder, max_num_batched_tokens=128)
    for request_id in ("b", "d"):
        engine.submit(request_id, PROMPTS[request_id], SamplingParams(max_tokens=MAX_TOKENS))
    engine.step()
    assert any(line.startswith("hit d") for line in recorder.log)
    assert drain(engine) == {request_id: expected["qwen3", request_id] for request_id in ("b", "d")}


def test_a_forward_pass_that_raises_is_passed_on_and_no_step_follows(make_engine, monkeypatch):
    engine = make_engine()
    engine.submit("a", PROMPTS["a"], SamplingParams())

    def lost(batch, copies):
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine.runner, "launch", lost)
    with pytest.raises(RuntimeError, match="device lost"):
        engine.step()
    monkeypatch.undo()
    with pytest.raises(Exception, match="an earlier forward pass failed") as refusal:
        engine.step()
    assert refusal.value.code == "failed"
