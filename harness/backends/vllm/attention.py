"""Paged attention in plain torch, for any block size and any head size.

vLLM's kernels want blocks of a multiple of 32 tokens on CPU and of 16 on CUDA, and heads of some sizes. A pool in which
requests meet (preemption, eviction, sharing) within a few tokens has blocks of 2 to 4, so for those
shapes a backend of `attention_cpu` or `attention_cuda` takes the kernels' place. Everything else is vLLM's:
model, worker, KV cache tensors and their layout, block tables, slots.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch


def write(keys: torch.Tensor, values: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write a step's keys and values, [tokens, KV heads, head size], into their slots; slot -1 is padding.

    Args:
        keys, values: the cache, views [blocks, KV heads, block size, head size].
        slot_mapping: [tokens], block * block size + offset.
    """
    written = slot_mapping >= 0
    slots = slot_mapping[written]
    block, offset = slots // keys.shape[2], slots % keys.shape[2]
    keys[block, :, offset] = key[: len(written)][written]
    values[block, :, offset] = value[: len(written)][written]


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, metadata: Any, *, scale: float, output: torch.Tensor
) -> torch.Tensor:
    """Causal attention of a step's queries over their requests' cached entries, one request at a time.

    Args:
        query, output: [tokens, heads, head size].
        keys, values: the cache, views [blocks, KV heads, block size, head size].
        metadata: vLLM's: `query_start_loc` [requests + 1], `seq_lens` [requests], `block_table` [requests, most blocks].
    """
    starts, lengths = metadata.query_start_loc.tolist(), metadata.seq_lens.tolist()
    for row, (begin, end) in enumerate(pairwise(starts)):
        if begin == end:
            continue
        length = lengths[row]
        blocks = metadata.block_table[row][: -(-length // keys.shape[2])].long()
        positions = torch.arange(length - (end - begin), length, device=query.device)
        seen = torch.arange(length, device=query.device)[None, :] <= positions[:, None]
        groups = query.shape[1] // keys.shape[1]
        cached = [_per_head(entries[blocks], length, groups) for entries in (keys, values)]
        attended = torch.nn.functional.scaled_dot_product_attention(query[begin:end].transpose(0, 1), *cached, attn_mask=seen, scale=scale)
        output[begin:end] = attended.transpose(0, 1)
    return output


def _per_head(entries: torch.Tensor, length: int, groups: int) -> torch.Tensor:
    """[blocks, KV heads, block size, head size] to [heads, length, head size]; each KV head serves so many heads."""
    return entries.transpose(0, 1).flatten(1, 2)[:, :length].repeat_interleave(groups, dim=0)
