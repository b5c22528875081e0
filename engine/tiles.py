"""The same bits whatever the batch: every pass through the model has the same number of rows.

Kernels choose how they sum by the shape that they are given, so a token computed among
others comes out with other bits than alone. Here the rows of a step are cut into tiles of
one fixed size, the last one filled up, and each tile is a pass of its own: every matrix
product, norm and activation sees one shape for ever. Attention is the exception and is
made exact by itself (attention.py): a query's call depends on its position alone.

What is left is the place of a row within its tile; `rows_differ` asks whether it matters.
docs/numerics.md tells why, what was tried, and what it costs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import pad
from transformers import PreTrainedModel

from .attention import Chunk, KVCache, PagedKV, PagedStep
from .device import to_device

ROWS = {"cpu": 8, "cuda": 64}
"""Rows of a pass by type of device: few enough that a small decode batch wastes little, enough that a prefill is fast."""


class Rows(NamedTuple):
    """Consecutive tokens of one request that are to be computed."""

    num_tokens: int
    first: int
    """Position of the first of them; all before it are in the cache, or among the rows given before these."""
    blocks: Sequence[int]
    """The request's block table."""
    num_logits: int
    """Logits are wanted for so many of the last rows."""

    @property
    def end(self) -> int:
        """Position after the last of them."""
        return self.first + self.num_tokens


class TiledModel:
    """A causal language model that computes any rows in passes of one size.

    Args:
        model: loaded with `attention.IMPLEMENTATION`.
        device: where its weights are.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device) -> None:
        self.model = model
        self.device = device
        self.num_rows = ROWS.get(device.type, ROWS["cuda"])
        self._all = torch.arange(self.num_rows, device=device)
        self._none = self._all[:0]

    @property
    def vocab_size(self) -> int:
        """Number of token ids that have an embedding."""
        embedding = self.model.get_input_embeddings()
        assert isinstance(embedding, torch.nn.Embedding), embedding
        return embedding.num_embeddings

    @torch.inference_mode()
    def logits(self, cache: KVCache, token_ids: torch.Tensor, rows: Sequence[Rows]) -> torch.Tensor:
        """Compute rows and store their keys and values in the cache.

        Rows may attend to entries that rows given before them write.

        Args:
            token_ids: int64 [tokens of all rows], on the device, in the order of the rows.

        Returns:
            [number of logits wanted, vocabulary], in the order of the rows.
        """
        positions = to_device([position for piece in rows for position in range(piece.first, piece.end)], self.device)
        filled = pad(torch.stack([token_ids, positions]), (0, -len(token_ids) % self.num_rows))
        parts = []
        for inputs, tile in zip(filled.split(self.num_rows, dim=1), _tiles(rows, self.num_rows), strict=True):
            step = PagedStep(cache, [Chunk(piece.first, piece.end, piece.blocks) for piece in tile])
            wanted = _wanted(tile)
            logits = self._pass(inputs, step, head=bool(wanted))
            parts.append(logits.index_select(0, to_device(wanted, self.device)))
        return torch.cat(parts)

    @torch.inference_mode()
    def rows_differ(self, paged: PagedKV) -> bool:
        """Whether equal rows of one pass get other bits by their place in it: then no batch invariance is to be had here.

        Args:
            paged: attention that treats equal rows equally.
        """
        logits = self._pass(torch.zeros(2, self.num_rows, dtype=torch.int64, device=self.device), paged, head=True)
        return not torch.equal(logits, logits[:1].expand_as(logits))

    def _pass(self, inputs: torch.Tensor, paged: PagedKV, *, head: bool) -> torch.Tensor:
        """One pass over `num_rows` rows: [num_rows, vocabulary], or [0, vocabulary] without the head.

        Args:
            inputs: token ids and positions, int64 [2, num_rows].
        """
        kept = self._all if head else self._none
        output = self.model(input_ids=inputs[:1], position_ids=inputs[1:], use_cache=False, logits_to_keep=kept, paged=paged)
        return output.logits[0]


def _tiles(rows: Sequence[Rows], size: int) -> Iterator[list[Rows]]:
    """Cut into tiles of `size` rows, the last one of fewer."""
    tile: list[Rows] = []
    space = size
    for piece in rows:
        while piece.num_tokens:
            count = min(space, piece.num_tokens)
            rest = piece._replace(num_tokens=piece.num_tokens - count, first=piece.first + count)
            num_logits = max(0, piece.num_logits - rest.num_tokens)
            tile.append(piece._replace(num_tokens=count, num_logits=num_logits))
            space -= count
            piece = rest._replace(num_logits=piece.num_logits - num_logits)
            if not space:
                yield tile
                tile, space = [], size
    if tile:
        yield tile


def _wanted(tile: Sequence[Rows]) -> list[int]:
    """Places within the tile of the rows whose logits are wanted."""
    wanted: list[int] = []
    end = 0
    for piece in tile:
        end += piece.num_tokens
        wanted += range(end - piece.num_logits, end)
    return wanted
