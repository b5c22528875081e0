"""What bits that do not depend on the batch cost: steps in tiles of fixed size against steps in one pass of any size.

Both compute the same rows of one model, in turns, on one thread; times are CPU time. One pass is the way that engines
commonly go: all rows at once, one masked attention call a request. Besides the time it is counted how many requests'
logits keep their bits when they run together instead of alone, and what the golden checks of a whole run take.

    python benchmarks/numerics.py [tiny] [smollm2]
"""

from __future__ import annotations

import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from torch.nn.functional import scaled_dot_product_attention

from engine.attention import Chunk, KVCache, PagedStep
from engine.config import EngineConfig
from engine.model_runner import load_model, probe_layers
from engine.tiles import ROWS, Rows, TiledModel
from harness.backends.torch import TorchBackend
from harness.checkpoints import ensure
from harness.operations import Advance, Operation, Pause, Perturbation, Prompt, Resume, Submit, SwapWeights, WeightSource
from harness.scenario import EngineShape, Scenario
from harness.trial import run_trial

ROUNDS = 9
BLOCK_SIZE = 16
CONTEXT = 128


class MaskedStep(PagedStep):
    """Attention of all rows of a request in one call, as wide as its sequence."""

    def __init__(self, cache: KVCache, chunks: Sequence[Chunk]) -> None:
        super().__init__(cache, chunks)
        self._masks = [
            None if (rows := chunk.end - chunk.first) == 1 else torch.ones(rows, chunk.end, dtype=torch.bool).tril(chunk.first)
            for chunk in chunks
        ]

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None) -> torch.Tensor:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        keys.index_copy_(0, self._written, key)
        values.index_copy_(0, self._written, value)
        out = query.new_empty(*query.shape[:2], values.shape[2])
        for view, mask in zip(self._views, self._masks, strict=True):
            rows = slice(view.start, view.start + view.rows)
            found = (query[rows], keys.index_select(0, view.slots), values.index_select(0, view.slots))
            q, k, v = (tensor.transpose(0, 1).unsqueeze(0) for tensor in found)
            seen = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
            out[rows] = seen[0].transpose(0, 1)
        return out


class OnePassModel(TiledModel):
    """All rows of a step in one pass, as many as there are."""

    @torch.inference_mode()
    def logits(self, cache: KVCache, token_ids: torch.Tensor, rows: Sequence[Rows]) -> torch.Tensor:
        step = MaskedStep(cache, [Chunk(piece.first, piece.end, piece.blocks) for piece in rows])
        positions = torch.tensor([position for piece in rows for position in range(piece.first, piece.end)])
        ends = torch.tensor([piece.num_tokens for piece in rows]).cumsum(0) - 1
        kept = ends[[piece.num_logits > 0 for piece in rows]]
        inputs = torch.stack([token_ids, positions])
        output = self.model(input_ids=inputs[:1], position_ids=inputs[1:], use_cache=False, logits_to_keep=kept, paged=step)
        return output.logits[0]


class Case(NamedTuple):
    name: str
    rows: list[Rows]


def cases() -> list[Case]:
    decodes = [Case(f"decode, {count} requests", [request(index, CONTEXT - 1) for index in range(count)]) for count in (1, 4, 8, 16)]
    return [*decodes, Case(f"prefill of {CONTEXT} tokens", [request(0, 0)])]


def request(index: int, first: int) -> Rows:
    """The tokens of a request from position `first` to the end of its context, in blocks of its own."""
    blocks = list(range(index * CONTEXT // BLOCK_SIZE, (index + 1) * CONTEXT // BLOCK_SIZE))
    return Rows(CONTEXT - first, first, blocks, 1)


def tokens_of(rows: Sequence[Rows]) -> torch.Tensor:
    """Some token for each row, a function of its request and position alone."""
    token_ids = [(7 * position + piece.blocks[0]) % 500 for piece in rows for position in range(piece.first, piece.end)]
    return torch.tensor(token_ids)


class Models:
    """One model's weights, computed in both ways."""

    def __init__(self, checkpoint: str) -> None:
        folder = ensure(checkpoint)
        num_blocks = 16 * CONTEXT // BLOCK_SIZE
        config = EngineConfig(
            checkpoint=folder,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            max_model_len=CONTEXT + 1,
            max_num_seqs=16,
            max_num_batched_tokens=256,
        )
        device = torch.device("cpu")
        model = load_model(config, device)
        self.ways = {"one pass": OnePassModel(model, device), "tiles": TiledModel(model, device)}
        layers = probe_layers(self.ways["tiles"], config)
        self.cache = KVCache(layers, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=model.dtype, device=device)

    def milliseconds(self, case: Case) -> dict[str, float]:
        """Median of a step, the ways taking turns."""
        times: dict[str, list[float]] = {way: [] for way in self.ways}
        for _ in range(ROUNDS):
            for way, model in self.ways.items():
                began = time.process_time()
                model.logits(self.cache, tokens_of(case.rows), case.rows)
                times[way].append((time.process_time() - began) * 1e3)
        return {way: statistics.median(values[1:]) for way, values in times.items()}

    def equal(self, way: str) -> int:
        """Of 4 requests prefilled together, in chunks of 7 beside each other, how many have the bits that they have alone."""
        model, requests = self.ways[way], [request(index, 0) for index in range(4)]
        alone = [model.logits(self.cache, tokens_of([rows]), [rows])[0] for rows in requests]
        for first in range(0, CONTEXT, 7):
            pieces = [rows._replace(num_tokens=min(7, CONTEXT - first), first=first) for rows in requests]
            together = model.logits(self.cache, tokens_of(pieces), pieces)
        return sum(torch.equal(one, other) for one, other in zip(alone, together, strict=True))


def golden(checkpoint: str) -> tuple[float, float]:
    """CPU seconds that a run of 4 requests over one update takes, and its golden checks; three runs, the fastest."""
    shape = EngineShape(checkpoint=checkpoint, block_size=BLOCK_SIZE, num_blocks=64, max_model_len=256, max_num_seqs=4)
    swap = SwapWeights(source=WeightSource(perturb=Perturbation(seed=1, scale=0.05)), version="v2")
    requests: list[Operation] = [
        Submit(id=f"r{seed}", prompt=Prompt(tokens=10, seed=seed), max_tokens=40, ignore_eos=True) for seed in range(4)
    ]
    scenario = Scenario.from_operations(shape, [*requests, Advance(steps=12), Pause(mode="keep", clear_cache=False), swap, Resume()])
    return min(_golden(scenario) for _ in range(3))


def _golden(scenario: Scenario) -> tuple[float, float]:
    backend = Timed()
    info = backend.start(scenario.engine)
    with tempfile.TemporaryDirectory() as folder:
        began = time.process_time()
        trial = run_trial(scenario, backend, info, Path(folder))
        whole = time.process_time() - began
    backend.stop()
    assert trial.verdict.status == "holds", trial.verdict.reasons
    return whole - backend.checking, backend.checking


class Timed(TorchBackend):
    """Knows how long its golden checks took."""

    checking = 0.0

    def references(self, entries):
        began = time.process_time()
        found = super().references(entries)
        self.checking = time.process_time() - began
        return found


def main() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    print(f"{platform.platform()}; Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}")
    print("command: python benchmarks/numerics.py")
    print(f"CPU time, one thread, tiles of {ROWS['cpu']} rows, medians of {ROUNDS - 1} rounds in turns")
    for checkpoint in sys.argv[1:] or ["tiny", "smollm2"]:
        models = Models(checkpoint)
        print(f"\n{checkpoint}")
        for case in cases():
            found = models.milliseconds(case)
            one_pass, tiles = found["one pass"], found["tiles"]
            print(f"  {case.name:<24} {one_pass:8.2f} ms in one pass {tiles:8.2f} ms in tiles, x{tiles / one_pass:.2f}")
        print(f"  bits kept in company     {models.equal('one pass')} of 4 in one pass, {models.equal('tiles')} of 4 in tiles")
        run, checks = golden(checkpoint)
        print(f"  a run and its checks     {run:8.2f} s the run, {checks:.3f} s golden checks")


if __name__ == "__main__":
    main()
