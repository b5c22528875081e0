"""Attention of plain torch beside vLLM's CUDA kernels, through vLLM's own registry of attention backends."""

# pyright: reportMissingImports=false
# vLLM is not among what lint installs.

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends import triton_attn

from harness.backends.vllm.attention import attend, write


class PlainAttentionBackend(triton_attn.TritonAttentionBackend):
    """Registered as CUSTOM. The cache and its layout are those of Triton's kernels, with which the metadata comes too."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_supported_kernel_block_sizes(*_: Any) -> list[int | MultipleOf]:
        return [MultipleOf(1)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return True

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return True

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_impl_cls() -> type[PlainAttention]:
        return PlainAttention


class PlainAttention(triton_attn.TritonAttentionImpl):
    """Causal decoder attention; no sliding window, no soft cap, no sinks."""

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: triton_attn.TritonAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`query` and `output` are [tokens, heads, head size]; `kv_cache` is [blocks, KV heads, block size, 2 * head size]."""
        if attn_metadata is None:  # vLLM measures memory
            return output.fill_(0)
        return attend(query, *_halves(kv_cache), attn_metadata, scale=self.scale, output=output)

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        write(*_halves(kv_cache), key, value, slot_mapping)


def _halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the keys and the values, each [blocks, KV heads, block size, head size], as Triton's kernels lay them out."""
    keys, values = kv_cache.split(kv_cache.shape[-1] // 2, dim=-1)
    return keys, values
