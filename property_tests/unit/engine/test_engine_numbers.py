"""The same bits whatever the batch: companions, chunking, recomputation and block size change no logit, not even its last bit."""

from __future__ import annotations

import warnings

import pytest
import torch

from engine import EngineConfig, EngineCore, ForwardFailed, NotFinite, SamplingParams, UpdateFailed
from engine.attention import KVCache, LayerShape
from engine.tiles import ROWS, Rows, _tiles, _wanted
from harness.checkpoints import ensure

PROMPTS = {
    "a": [11, 12, 13, 14, 15],
    "b": [(7 * i) % 500 for i in range(17)],
    "c": [(13 * i) % 500 for i in range(30)],
    "d": [(7 * i) % 500 for i in range(14)],  # shares three blocks with b
}
MAX_TOKENS = 12
ALONE = {"max_num_seqs": 1, "max_num_batched_tokens": 128, "prefix_caching": False}

SHAPES = {
    "companions": {"max_num_batched_tokens": 128, "prefix_caching": False},
    "chunks of 5": {"max_num_batched_tokens": 5},
    "chunks of 3 beside decodes": {"long_prefill_token_threshold": 3},
    "hits": {"max_num_batched_tokens": 128},
    "preemption": {"num_blocks": 13},
    "blocks of one token": {"block_size": 1, "num_blocks": 128},
    "blocks of seven tokens": {"block_size": 7},
    "as many as a tile": {"max_num_seqs": 4, "max_num_batched_tokens": 8},
    "a step in flight": {"async_scheduling": True},
    "preemption of a step in flight": {"async_scheduling": True, "num_blocks": 13},
    "evicted and loaded": {"num_blocks": 13, "host_blocks": 6},
}


class Logits:
    """Drives an engine and keeps the logits of each sampled row, by request and position."""

    def __init__(self, engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = engine
        self.rows: dict[tuple[str, int], torch.Tensor] = {}
        tiled = engine.runner.tiled
        right_launch, right_logits = engine.runner.launch, tiled.logits

        def launch(batch, copies):
            self._samplers = [(share.request.request_id, share.end) for share in batch if share.samples]
            return right_launch(batch, copies)

        def logits(cache, token_ids, rows):
            found = right_logits(cache, token_ids, rows)
            self.rows.update(zip(self._samplers, found, strict=True))
            return found

        monkeypatch.setattr(engine.runner, "launch", launch)
        monkeypatch.setattr(tiled, "logits", logits)

    def differing(self, other: Logits) -> list[tuple[str, int]]:
        """Rows in which two engines' logits are not equal to the bit."""
        assert self.rows.keys() == other.rows.keys()
        return [key for key, row in self.rows.items() if not torch.equal(row, other.rows[key])]


@pytest.fixture
def logits_of(make_engine, drain, monkeypatch):
    """logits_of(shape, prompts): the logits of every token, all prompts handed in at once."""

    def run(shape: dict, prompts: dict[str, list[int]] = PROMPTS, **overrides) -> Logits:
        engine = make_engine(**{**shape, **overrides})
        logits = Logits(engine, monkeypatch)
        for request_id, prompt in prompts.items():
            engine.submit(request_id, prompt, SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True))
        drain(engine)
        return logits

    return run


@pytest.mark.parametrize(("kind", "tied", "dtype"), [("qwen3", False, "float32"), ("llama", True, "float32"), ("llama", True, "bfloat16")])
def test_no_batch_changes_a_bit(logits_of, checkpoint, kind, tied, dtype):
    model = {"checkpoint": checkpoint(kind, tied=tied), "dtype": dtype}
    alone = logits_of(ALONE, **model)
    assert len(alone.rows) == MAX_TOKENS * len(PROMPTS)
    assert {name: logits_of(shape, **model).differing(alone) for name, shape in SHAPES.items()} == {name: [] for name in SHAPES}


def test_recomputation_after_a_clear_changes_no_bit(make_engine, logits_of, drain, monkeypatch):
    engine = make_engine()
    logits = Logits(engine, monkeypatch)
    for request_id, prompt in PROMPTS.items():
        engine.submit(request_id, prompt, SamplingParams(max_tokens=MAX_TOKENS))
    for _ in range(5):
        for _ in range(3):
            engine.step()
        engine.pause("keep")
        engine.resume()
    drain(engine)
    assert logits.differing(logits_of(ALONE)) == []


def test_threads_do_not_make_bits_depend_on_the_batch(logits_of):
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert logits_of(SHAPES["chunks of 5"]).differing(logits_of(ALONE)) == []
    finally:
        torch.set_num_threads(before)


def test_no_batch_changes_a_bit_of_a_real_model(monkeypatch, drain):
    """SmolLM2-135M, 30 layers: one engine, the pool emptied in between."""
    config = EngineConfig(
        checkpoint=ensure("smollm2"), block_size=16, num_blocks=64, max_model_len=128, max_num_seqs=4, max_num_batched_tokens=256
    )
    engine = EngineCore(config)

    def run(*, together: bool, chunk: int = 0) -> Logits:
        engine.scheduler.config = EngineConfig(
            **{**vars(config), "long_prefill_token_threshold": chunk, "max_num_seqs": 4 if together else 1}
        )
        logits = Logits(engine, monkeypatch)
        for request_id, prompt in PROMPTS.items():
            engine.submit(request_id, prompt, SamplingParams(max_tokens=3, ignore_eos=True))
        drain(engine)
        engine.reset_prefix_cache()
        return logits

    alone = run(together=False)
    assert run(together=True).differing(alone) == []
    assert run(together=True, chunk=7).differing(alone) == []


# ---- tiles ----


def rows(first: int, count: int, num_logits: int) -> Rows:
    return Rows(count, first, (), num_logits)


def test_rows_are_cut_into_tiles_in_order_and_each_logit_is_wanted_once():
    tiles = list(_tiles([rows(0, 3, 0), rows(5, 9, 4), rows(2, 1, 1)], 5))
    assert [[(piece.first, piece.num_tokens, piece.num_logits) for piece in tile] for tile in tiles] == [
        [(0, 3, 0), (5, 2, 0)],
        [(7, 5, 2)],
        [(12, 2, 2), (2, 1, 1)],
    ]
    assert [_wanted(tile) for tile in tiles] == [[], [3, 4], [0, 1, 2]]


def test_slots_of_a_block_table():
    cache = KVCache({0: LayerShape((1, 2), (1, 2))}, num_blocks=8, block_size=4, dtype=torch.float32, device=torch.device("cpu"))
    assert cache.slots([3, 1, 7], 6).tolist() == [12, 13, 14, 15, 4, 5]


def test_a_platform_whose_rows_differ_is_warned_of(make_engine, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = make_engine()
    right = type(engine.runner.tiled)._pass

    def uneven(self, *args, **kwargs):
        return right(self, *args, **kwargs) + torch.arange(ROWS["cpu"])[:, None]

    monkeypatch.setattr(type(engine.runner.tiled), "_pass", uneven)
    with pytest.warns(RuntimeWarning, match="gives equal rows of one pass different bits"):
        make_engine()


# ---- NaN and infinity ----


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39], ids=["nan", "infinity", "beyond float32"])
def test_weights_that_are_not_finite_are_refused_before_a_byte_is_written(make_engine, value):
    engine = make_engine()
    before = engine.runner.model.state_dict()["model.norm.weight"].clone()
    engine.pause("keep")
    engine.start_weight_update()
    with pytest.raises(UpdateFailed, match=r"'model\.norm\.weight' holds NaN or infinity as torch\.float32") as failure:
        engine.update_weights([("model.norm.weight", torch.full((64,), value, dtype=torch.float64))])
    assert not failure.value.wrote and engine.update_open
    assert torch.equal(engine.runner.model.state_dict()["model.norm.weight"], before)


def test_a_checkpoint_that_is_not_finite_does_not_start(checkpoint, make_engine, tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint())
    with torch.no_grad():
        model.model.norm.weight[3] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds NaN or infinity in 'model\.norm\.weight' as float32"):
        make_engine(checkpoint=tmp_path)


def test_logits_that_are_not_finite_sample_nothing_and_no_step_follows(make_engine, recorder):
    engine = make_engine(observer=recorder)
    engine.submit("a", PROMPTS["a"], SamplingParams())
    engine.step()
    engine.pause("keep", clear_cache=False)
    norm = torch.full((64,), 1e38)  # finite, but what is computed by it is not
    engine.load_weights([("model.layers.0.input_layernorm.weight", norm), ("model.layers.1.input_layernorm.weight", norm)], "v2")
    engine.resume()
    recorder.take()
    with pytest.raises(NotFinite, match="the logits of a hold NaN or infinity"):
        engine.step()
    assert recorder.take()[-1].startswith("step_failed 2 why=NotFinite: the logits of a hold NaN or infinity")
    assert engine.take_outputs() == []
    with pytest.raises(ForwardFailed, match="an earlier forward pass failed"):
        engine.step()
    assert engine.abort(["a"]) == 1
    assert len(engine.take_outputs()[0].token_ids) == 0
