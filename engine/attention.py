"""Attention over a paged KV pool, behind transformers' attention interface.

The model code is transformers' own; it calls `paged_attention` once a layer for
all rows of a pass, flattened to one sequence. What that call must know about
the pass travels with it as the keyword `paged`, so nothing is global but the
function's name. transformers builds no masks for a name that it does not know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from .device import to_device
from .host_tier import BlockCopy

IMPLEMENTATION = "caesura_paged"
"""Name under which the function is registered: the `attn_implementation` to load a model with."""


class PagedKV(Protocol):
    """What a layer's attention does with the rows of one pass."""

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
        """Store the rows' keys and values and return what their queries see.

        Args:
            layer: the layer's index in the model.
            query: [rows, heads, head_dim].
            key: [rows, kv_heads, head_dim].
            value: [rows, kv_heads, value_dim].
            scaling: factor of the scores; None for 1 / sqrt(head_dim).

        Returns:
            [rows, heads, value_dim].
        """
        ...


def paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedKV,
    scaling: float | None = None,
    **variant: object,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: tensors are [1, heads, rows, head_dim], the result is [1, rows, heads, value_dim]."""
    if isinstance(paged, LayerProbe):
        paged.check(module, attention_mask, variant)
    layer = module.layer_idx
    assert isinstance(layer, int), layer
    out = paged.attend(layer, query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scaling)
    return out.unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, paged_attention)


class LayerShape(NamedTuple):
    """Shapes of one layer's KV entry for one token."""

    key: tuple[int, int]
    """(kv_heads, head_dim)"""
    value: tuple[int, int]
    """(kv_heads, value_dim)"""


class LayerProbe:
    """Learns a model's KV shapes from one forward pass, and refuses attention that this engine would compute wrongly.

    Args:
        max_model_len: a sliding window at least this long never slides, so it is accepted.
    """

    def __init__(self, max_model_len: int) -> None:
        self.layers: dict[int, LayerShape] = {}
        self._max_model_len = max_model_len

    def check(self, module: torch.nn.Module, attention_mask: torch.Tensor | None, variant: dict[str, object]) -> None:
        """Raises: ValueError, for attention that is more than causal softmax over the whole sequence."""
        if not getattr(module, "is_causal", True):
            raise ValueError(f"{type(module).__name__} is not causal; this engine serves decoder-only models")
        if attention_mask is not None:
            raise ValueError(f"{type(module).__name__} insists on a mask of its own, which a paged step has no place for")
        window = variant.get("sliding_window")
        if isinstance(window, int) and window < self._max_model_len:
            raise ValueError(
                f"{type(module).__name__} has a sliding window of {window} tokens, below max_model_len ({self._max_model_len})"
            )
        for name in ("softcap", "s_aux", "position_bias"):
            if variant.get(name) is not None:
                raise ValueError(f"{type(module).__name__} asks for {name!r}, which this engine's attention does not compute")

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
        if layer in self.layers:
            raise ValueError(f"layer {layer} attends twice in a pass; this engine keeps one KV entry a layer and token")
        self.layers[layer] = LayerShape((key.shape[1], key.shape[2]), (value.shape[1], value.shape[2]))
        return query.new_zeros(*query.shape[:2], value.shape[2])


class KVCache:
    """Keys and values of every slot of the pool; slot = block * block_size + offset.

    Attributes:
        keys, values: by layer, [num_blocks * block_size, kv_heads, head_dim or value_dim].
        host_keys, host_values: those of the host tier, [host_blocks * block_size, ...], in pinned memory on CUDA.
    """

    def __init__(
        self,
        layers: dict[int, LayerShape],
        *,
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        host_blocks: int = 0,
    ) -> None:
        def zeros(blocks: int, shape: tuple[int, int], **where: Any) -> torch.Tensor:
            return torch.zeros(blocks * block_size, *shape, dtype=dtype, **where)

        pinned = host_blocks > 0 and device.type == "cuda"
        self.device = device
        self.keys = {layer: zeros(num_blocks, shape.key, device=device) for layer, shape in layers.items()}
        self.values = {layer: zeros(num_blocks, shape.value, device=device) for layer, shape in layers.items()}
        self.host_keys = {layer: zeros(host_blocks, shape.key, pin_memory=pinned) for layer, shape in layers.items()}
        self.host_values = {layer: zeros(host_blocks, shape.value, pin_memory=pinned) for layer, shape in layers.items()}
        self._block_size = block_size
        self._offsets = torch.arange(block_size)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All that lies on the device."""
        return [*self.keys.values(), *self.values.values()]

    def copy_blocks(self, copies: Sequence[BlockCopy]) -> None:
        """Copy blocks between the tiers, one after the other; on CUDA in the order of the stream, without waiting."""
        for to, block, slot in copies:
            here, there = self._rows(block), self._rows(slot)
            for device, host in ((self.keys, self.host_keys), (self.values, self.host_values)):
                for layer in device:
                    ours, theirs = device[layer][here], host[layer][there]
                    if to == "host":
                        theirs.copy_(ours, non_blocking=True)
                    else:
                        ours.copy_(theirs, non_blocking=True)

    def _rows(self, block: int) -> slice:
        return slice(block * self._block_size, (block + 1) * self._block_size)

    def slots(self, blocks: Sequence[int], count: int) -> torch.Tensor:
        """Slots of the first `count` tokens of a block table: int64 [count], on the CPU."""
        needed = -(-count // self._block_size)
        return (torch.tensor(blocks[:needed])[:, None] * self._block_size + self._offsets).flatten()[:count]


class Chunk(NamedTuple):
    """One request's rows in a pass: they are its tokens from `first` up to `end`, and see those before them."""

    first: int
    end: int
    blocks: Sequence[int]
    """The request's block table."""


@dataclass(frozen=True)
class _View:
    """What the rows of one chunk see."""

    start: int
    """Place of its first row in the pass."""
    first: int
    """Position of that row: it sees the entries up to its own."""
    rows: int
    slots: torch.Tensor
    """Slots of the sequence up to the last row's own: int64 [entries]."""


class PagedStep:
    """One pass over the KV cache: writes all rows' entries, then attends query by query over exactly what each may see.

    A query's call has the shape of its position, whatever else is computed beside it, so its bits depend on its
    sequence alone. Rows of one pass never share a slot. A request may read entries that another writes in this
    very pass (a prefix hit on a block just published): hence all writes of a layer come before its first read.
    Rows behind those of the chunks only fill the pass up: nothing of them is stored, and they see nothing.
    """

    def __init__(self, cache: KVCache, chunks: Sequence[Chunk]) -> None:
        self._cache = cache
        visible = [cache.slots(chunk.blocks, chunk.end) for chunk in chunks]
        # One transfer each instead of one for every request.
        self._written = to_device(torch.cat([slots[chunk.first :] for slots, chunk in zip(visible, chunks, strict=True)]), cache.device)
        on_device = to_device(torch.cat(visible), cache.device).split([len(slots) for slots in visible])
        self._views = []
        start = 0
        for chunk, slots in zip(chunks, on_device, strict=True):
            rows = chunk.end - chunk.first
            self._views.append(_View(start, chunk.first, rows, slots))
            start += rows

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys.index_copy_(0, self._written, key[: len(self._written)])
        values.index_copy_(0, self._written, value[: len(self._written)])
        out = query.new_zeros(*query.shape[:2], values.shape[2])
        shared_heads = query.shape[1] != keys.shape[1]
        for view in self._views:
            # [entries, heads, dim] -> [1, heads, entries, dim]
            seen_keys, seen_values = (pool.index_select(0, view.slots).transpose(0, 1).unsqueeze(0) for pool in (keys, values))
            for row in range(view.rows):
                entries = view.first + row + 1
                q, k, v = query[None, view.start + row, :, None], seen_keys[:, :, :entries], seen_values[:, :, :entries]
                out[view.start + row] = scaled_dot_product_attention(q, k, v, scale=scaling, enable_gqa=shared_heads)[0, :, 0]
        return out
