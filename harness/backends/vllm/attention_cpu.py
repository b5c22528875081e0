"""Attention of plain torch in the place of vLLM's CPU kernels, through vLLM's own registry of attention backends."""

# pyright: reportMissingImports=false
# vLLM is not among what lint installs.

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata, MultipleOf
from vllm.v1.attention.backends import cpu_attn

from harness.backends.vllm.attention import attend, write


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
    """Causal decoder attention; no sliding window, no soft cap, no sinks."""

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
        if attn_metadata is not None:  # None: vLLM warms up
            attend(query, *_halves(kv_cache), attn_metadata, scale=self.scale, output=output)
        return output

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        write(*_halves(kv_cache), key, value, slot_mapping)


def _halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the keys and the values, each [blocks, KV heads, block size, head size], as vLLM's CPU kernels lay them out."""
    blocks, heads, size, _ = kv_cache.shape
    keys, values = kv_cache.view(blocks, heads, size * 2, -1).chunk(2, dim=2)
    return keys, values
