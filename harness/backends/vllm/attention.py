"""Attention for vLLM on CPU with any block size and any head size, in plain torch.

vLLM's CPU kernels want blocks of a multiple of 32 tokens and heads of 32 and more. A pool in which
requests meet (preemption, eviction, sharing) within a few tokens has blocks of 2 to 4, so for those
shapes this backend takes the kernels' place, through vLLM's own registry of attention backends.
Everything else is vLLM's: model, worker, KV cache tensors and their layout, block tables, slots.
"""

# pyright: reportMissingImports=false
# vLLM is not among what lint installs.

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends import cpu_attn

KERNEL_BLOCK_SIZE = 32
"""vLLM's own CPU kernels take multiples of this."""


class PlainAttentionBackend(cpu_attn.CPUAttentionBackend):
    """Registered in the place of CPU_ATTN."""

    @staticmethod
    def get_supported_kernel_block_sizes(*_: Any) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return []  # any

    @staticmethod
    def get_impl_cls() -> type[PlainAttention]:
        return PlainAttention

    @staticmethod
    def get_builder_cls() -> type[PlainMetadataBuilder]:
        return PlainMetadataBuilder


class PlainMetadataBuilder(cpu_attn.CPUAttentionMetadataBuilder):
    """The kernels' own metadata, less the work plan that only the kernels need."""

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> cpu_attn.CPUAttentionMetadata:
        common = common_attn_metadata
        return cpu_attn.CPUAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc,
            max_seq_len=common.max_seq_len,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            scheduler_metadata=None,
        )


class PlainAttention(cpu_attn.CPUAttentionBackendImpl):
    """Causal decoder attention, one request at a time; no sliding window, no soft cap, no sinks."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: cpu_attn.CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`query` and `output` are [tokens, heads, head size]; `kv_cache` is [blocks, KV heads, block size, 2 * head size]."""
        if attn_metadata is None:  # vLLM warms up
            return output
        starts, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
        for row, length in enumerate(lengths):
            begin, end = starts[row], starts[row + 1]
            if begin == end:
                continue
            keys, values = self._cached(kv_cache, attn_metadata.block_table[row], length)
            positions = torch.arange(length - (end - begin), length)
            seen = torch.arange(length)[None, :] <= positions[:, None]
            attended = torch.nn.functional.scaled_dot_product_attention(
                query[begin:end].transpose(0, 1), keys, values, attn_mask=seen, scale=self.scale
            )
            output[begin:end] = attended.transpose(0, 1)
        return output

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write the step's keys and values, [tokens, KV heads, head size], into their slots; slot -1 is padding."""
        keys, values = _halves(kv_cache)
        written = slot_mapping >= 0
        slots = slot_mapping[written]
        block, offset = slots // keys.shape[2], slots % keys.shape[2]
        keys[block, :, offset] = key[: len(written)][written]
        values[block, :, offset] = value[: len(written)][written]

    def _cached(self, kv_cache: torch.Tensor, table: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a request's first `length` tokens, each [heads, length, head size]."""
        keys, values = _halves(kv_cache)
        blocks = table[: -(-length // keys.shape[2])].long()
        return self._per_head(keys[blocks], length), self._per_head(values[blocks], length)

    def _per_head(self, entries: torch.Tensor, length: int) -> torch.Tensor:
        """[blocks, KV heads, block size, head size] to [heads, length, head size]."""
        flat = entries.transpose(0, 1).flatten(1, 2)[:, :length]
        return flat.repeat_interleave(self.num_queries_per_kv, dim=0)


def _halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the keys and the values, each [blocks, KV heads, block size, head size], as vLLM's CPU kernels lay them out."""
    blocks, heads, size, _ = kv_cache.shape
    keys, values = kv_cache.view(blocks, heads, size * 2, -1).chunk(2, dim=2)
    return keys, values
