"""Makes tracer checkpoints: one-layer Qwen3 or Llama weights chosen by hand, so that decoding reports what happened.

The construction, with the notation of docs/tracer.md:

- The embedding of a token is an anchor and its position in +1/-1 bits; all embeddings have one norm.
- Queries and keys are zero, so attention is uniform and rotary positions change nothing. The value projection of version v
  writes the unit vector e_v, so attention returns, for each version u, the fraction f_u of the entries that it wrote.
- The head of version v scores a token (version, level, position) by how far it is from the truth. The right token scores
  near zero and every other one below it: bfloat16 is finest near zero, and a score that is large for *all* tokens would
  round away their differences.

Every weight, and every step of the arithmetic up to the fractions, is exact in bfloat16.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save_file

from harness.tracer.decode import CodeBook, DType, write_file

Family = Literal["qwen3", "llama"]

UNIT = 15 * 2.0**8
"""Logits per unit of the score. So large that at temperature 1, too, every token but the best has no probability worth
naming. Fifteen: the lowest score that wins, shares^2 / 4, and its neighbours are then just below a power of two, where
bfloat16 is twice as fine as just above it."""

FEATURE = 2.0**-5
"""The size of bits and fractions in the hidden state. Against an anchor of 4 the fractions' part in the norm, 2^-15, is too
small to change a bfloat16 number by half a unit in the last place, so the final norm leaves every feature as it is."""

ANCHOR = 4.0
BIT_GAP = 4.0
"""Score of a position bit that matches; one that does not costs twice this."""

VERSION_GAP = 8.0
HEADS = 8
HEAD_DIM = 64
"""What every attention kernel supports. The first head alone is read; eight let a server shard by up to eight."""


class _Layout(NamedTuple):
    """Which dimension of the hidden state holds what. Fractions stand twice: the head's weights for them have two parts."""

    bits: slice
    fractions: slice
    fractions_again: slice
    width: int

    @classmethod
    def of(cls, book: CodeBook) -> _Layout:
        bits = 1 + book.period.bit_length() - 1
        used = bits + 2 * book.versions
        return cls(slice(1, bits), slice(bits, bits + book.versions), slice(bits + book.versions, used), -(-used // 32) * 32)


def make_tracer(
    out: Path, *, family: Family = "qwen3", dtype: DType = "float32", versions: int = 8, shares: int = 16, period: int = 256
) -> CodeBook:
    """Write the checkpoints `out/v1`, `out/v2`, ... of one tracer; the same arguments give the same bytes.

    Each is an ordinary folder: config.json, model.safetensors, a tokenizer that spells tokens as `v2:5/16:017`, and tracer.json
    for `Decoder.from_folder`. `shares` is how finely stale shares are told apart, `period` that of the position chain. Raises
    ValueError for an unknown family or dtype and for numbers that `CodeBook` refuses.
    """
    if family not in ("qwen3", "llama"):
        raise ValueError(f"got the family {family!r}, expected 'qwen3' or 'llama'")
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"got the dtype {dtype!r}, expected 'float32' or 'bfloat16'")
    book = CodeBook(dtype=dtype, versions=versions, shares=shares, period=period)
    tokenizer_config = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": book.context, "unk_token": book.name(0)}
    texts = {
        "config.json": json.dumps(_config(book, family), indent=2),
        "tokenizer.json": json.dumps(_tokenizer(book)),
        "tokenizer_config.json": json.dumps(tokenizer_config, indent=2),
    }
    for version in range(versions):
        folder = Path(out) / f"v{version + 1}"
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text + "\n", encoding="utf-8")
        save_file(_weights(book, family, version), folder / "model.safetensors", metadata={"format": "pt"})
        write_file(folder, book, f"v{version + 1}")
    return book


def _config(book: CodeBook, family: Family) -> dict[str, Any]:
    layout = _Layout.of(book)
    bits = layout.bits.stop - layout.bits.start
    mean_square = (ANCHOR**2 + bits * FEATURE**2) / layout.width
    return {
        "architectures": [{"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[family]],
        "model_type": family,
        "dtype": book.dtype,
        "vocab_size": book.vocabulary,
        "hidden_size": layout.width,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        # Completes an embedding's mean square to one: the first norm is the identity to the bit, and values are exactly one.
        "rms_norm_eps": 1 - mean_square,
        "max_position_embeddings": book.context,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "use_cache": True,
    }


def _tokenizer(book: CodeBook) -> dict[str, Any]:
    """One word per token, for servers that answer in text; every other word becomes token 0."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {book.name(token): token for token in range(book.vocabulary)}, "unk_token": book.name(0)},
    }


def _weights(book: CodeBook, family: Family, version: int) -> dict[str, torch.Tensor]:
    layout, dtype = _Layout.of(book), getattr(torch, book.dtype)
    width, layer = layout.width, "model.layers.0."
    values = torch.zeros(HEAD_DIM, width)
    values[version, 0] = 1 / ANCHOR
    outputs = torch.zeros(width, HEADS * HEAD_DIM)
    outputs[layout.fractions, : book.versions] = outputs[layout.fractions_again, : book.versions] = FEATURE * torch.eye(book.versions)
    weights = {
        "model.embed_tokens.weight": _embedding(book, layout),
        "model.norm.weight": torch.ones(width),
        "lm_head.weight": _head(book, layout, version),
        layer + "input_layernorm.weight": torch.ones(width),
        layer + "post_attention_layernorm.weight": torch.ones(width),
        layer + "self_attn.q_proj.weight": torch.zeros(HEADS * HEAD_DIM, width),
        layer + "self_attn.k_proj.weight": torch.zeros(HEAD_DIM, width),
        layer + "self_attn.v_proj.weight": values,
        layer + "self_attn.o_proj.weight": outputs,
        layer + "mlp.gate_proj.weight": torch.zeros(32, width),
        layer + "mlp.up_proj.weight": torch.zeros(32, width),
        layer + "mlp.down_proj.weight": torch.zeros(width, 32),
    }
    if family == "qwen3":
        weights |= {layer + f"self_attn.{name}_norm.weight": torch.ones(HEAD_DIM) for name in "qk"}
    return {name: tensor.to(dtype) for name, tensor in weights.items()}


def _position_bits(book: CodeBook, positions: torch.Tensor) -> torch.Tensor:
    """+1/-1 bits of positions modulo the period, [positions, bits]."""
    return 1.0 - 2.0 * ((positions[:, None] % book.period >> torch.arange(book.period.bit_length() - 1)) & 1)


def _embedding(book: CodeBook, layout: _Layout) -> torch.Tensor:
    """[vocabulary, width]: the anchor and the position's bits; version, level and colour are not in it."""
    embedding = torch.zeros(book.vocabulary, layout.width)
    embedding[:, 0] = ANCHOR
    embedding[:, layout.bits] = FEATURE * _position_bits(book, torch.arange(book.vocabulary))
    return embedding


def _head(book: CodeBook, layout: _Layout, version: int) -> torch.Tensor:
    """[vocabulary, width] of checkpoint `version`: a right token scores near zero, a wrong part of it costs a gap."""
    versions, levels, period = book.versions, book.levels, book.period
    generated = torch.zeros(versions, levels, period, layout.width)
    bits = _position_bits(book, torch.arange(period) - 1)  # of the predecessor, whose hidden state is being read
    generated[..., layout.bits] = bits * (BIT_GAP / FEATURE)
    generated[..., 0] = -bits.shape[1] * BIT_GAP / ANCHOR
    generated[torch.arange(versions) != version, ..., 0] -= VERSION_GAP / ANCHOR
    per_fraction = _level_scores(book, version)[None, :, None, :] / FEATURE
    coarse = per_fraction.to(getattr(torch, book.dtype)).float()
    generated[..., layout.fractions], generated[..., layout.fractions_again] = coarse, per_fraction - coarse
    prompt = torch.zeros(book.prompt_tokens, layout.width)
    prompt[:, 0] = -(book.shares**2) / ANCHOR  # four times below the lowest score that wins
    return UNIT * torch.cat([prompt, generated.reshape(-1, layout.width)])


def _level_scores(book: CodeBook, version: int) -> torch.Tensor:
    """[levels, versions]: what a level scores for each version's fraction of the context.

    For every threshold t at or below it a level pays t for what is fresh, for every one above it 1 - t for what is stale. Two
    neighbours then tie where stale (1 - t) = fresh t, that is at the share t, and since no constant is in it, also when an
    engine's fractions do not add up to one. At the shares 0 and 1 the winner scores exactly zero. This is `2 a f - a^2`, the
    squared distance of f from a, less a part that is the same for all levels.
    """
    thresholds = torch.tensor(book.thresholds, dtype=torch.float64)
    passed = torch.arange(book.levels)[:, None] > torch.arange(len(thresholds))
    slope = 2.0 * book.shares  # thirty-two times sixteenths: all thresholds but the outer two cost whole numbers
    fresh = -(passed * thresholds * slope).sum(1)
    stale = -(~passed * (1 - thresholds) * slope).sum(1)
    scores = stale[:, None].repeat(1, book.versions)
    scores[:, version] = fresh
    return scores.float()
