"""What an engine refuses to be made of, before anything runs."""

from __future__ import annotations

import json

import pytest
from transformers import BertConfig, BertLMHeadModel, MistralConfig, MistralForCausalLM

from engine import SamplingParams

REFUSED = [
    ({"num_blocks": 0}, "num_blocks must be an integer of at least 1, got 0"),
    ({"block_size": 0}, "block_size"),
    ({"max_num_seqs": 0}, "max_num_seqs"),
    ({"max_model_len": 1}, "max_model_len"),
    ({"num_blocks": 2.5}, "num_blocks must be an integer"),
    ({"max_num_seqs": 8, "max_num_batched_tokens": 4}, r"max_num_batched_tokens \(4\) is below max_num_seqs \(8\)"),
    ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold"),
    ({"late_requests": "drop"}, "late_requests must be one of queue, reject, block, got 'drop'"),
    ({"dtype": "float8"}, "dtype must be one of"),
]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=[" ".join(overrides) for overrides, _ in REFUSED])
def test_a_shape_that_cannot_work_is_refused(make_config, overrides, message):
    with pytest.raises(ValueError, match=message):
        make_config(**overrides)


def test_a_missing_checkpoint_is_refused(make_engine, tmp_path):
    with pytest.raises(ValueError, match=r"no checkpoint in .*nowhere: expected a folder with config\.json"):
        make_engine(checkpoint=tmp_path / "nowhere")


def test_a_checkpoint_that_is_not_a_causal_language_model_is_refused(make_engine, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}))
    with pytest.raises(ValueError, match="T5ForConditionalGeneration; expected a decoder-only causal language model"):
        make_engine(checkpoint=tmp_path)


def test_a_model_that_looks_both_ways_is_refused(make_engine, tmp_path):
    BertLMHeadModel(
        BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16)
    ).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="cannot serve the BertLMHeadModel"):
        make_engine(checkpoint=tmp_path)


def test_a_sliding_window_shorter_than_the_sequences_is_refused(make_engine, tmp_path):
    config = MistralConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        sliding_window=32,
    )
    MistralForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"sliding window of 32 tokens, below max_model_len \(64\)"):
        make_engine(checkpoint=tmp_path, max_model_len=64)
    make_engine(checkpoint=tmp_path, max_model_len=32)


def test_a_checkpoint_that_lacks_weights_is_refused(make_engine, checkpoint, tmp_path):
    from safetensors.torch import load_file, save_file

    source = checkpoint()
    (tmp_path / "config.json").write_text((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 weights, the first of them 'model\.layers\.0\.mlp\.up_proj\.weight'"):
        make_engine(checkpoint=tmp_path)


def test_more_positions_than_the_model_has_are_refused(make_engine):
    with pytest.raises(ValueError, match=r"max_model_len \(1024\) exceeds the 512 positions"):
        make_engine(max_model_len=1024)


def test_end_of_sequence_ids_come_from_the_generation_config_first(make_engine, checkpoint, tmp_path):
    assert make_engine().eos_token_ids == ()
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((checkpoint() / name).read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "eos_token_id": 5}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert make_engine(checkpoint=tmp_path).eos_token_ids == (3, 4)
    (tmp_path / "generation_config.json").unlink()
    assert make_engine(checkpoint=tmp_path).eos_token_ids == (5,)


BAD_REQUESTS = {
    "empty": ([], {}, "the prompt is empty"),
    "as long as max_model_len": ([1] * 64, {}, r"64 tokens; expected fewer than max_model_len \(64\)"),
    "no tokens wanted": ([1], {"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
    "larger than the pool": ([1] * 8, {"max_tokens": 30}, "38 tokens need 10 blocks, the pool has 8"),
    "outside the vocabulary": ([1, 512], {}, "token 512 is outside the vocabulary of 512"),
    "negative token": ([-1, 2], {}, "token -1 is outside the vocabulary"),
    "live id": ([1], {}, "'live' exists already"),
}


@pytest.mark.parametrize("case", BAD_REQUESTS)
def test_a_request_that_could_never_run_is_refused_and_changes_nothing(make_engine, recorder, case):
    prompt, params, message = BAD_REQUESTS[case]
    engine = make_engine(observer=recorder, num_blocks=8, late_requests="reject")
    engine.submit("live", [1], SamplingParams())
    engine.begin_pause("keep")
    recorder.take()
    with pytest.raises(ValueError, match=message) as refusal:
        engine.submit("live" if case == "live id" else "new", prompt, SamplingParams(**params))
    assert refusal.value.code == "invalid"
    assert recorder.log == []
    assert [*engine.scheduler.requests] == ["live"]
