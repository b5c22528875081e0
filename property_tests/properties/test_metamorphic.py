"""What must change no greedy token: a pause with the same weights, the block size, the pool, the chunks, the company."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.events import Delivered, Event
from harness.operations import Pause, Prompt, Resume, Submit, SwapWeights, WeightSource
from harness.scenario import EngineShape

pytest.importorskip("torch")

from harness.backends.torch import TorchBackend

ROOMY = {"block_size": 8, "num_blocks": 64, "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
"""Nothing is chunked, preempted or evicted."""

requests = st.lists(
    st.builds(
        lambda length, seed, most: (Prompt(tokens=length, seed=seed), most), st.integers(1, 20), st.integers(0, 5), st.integers(1, 12)
    ),
    min_size=1,
    max_size=4,
)
tight = st.fixed_dictionaries(
    {
        "block_size": st.integers(2, 5),
        "num_blocks": st.integers(16, 20),
        "max_model_len": st.just(64),
        "max_num_seqs": st.integers(1, 4),
        "max_num_batched_tokens": st.integers(4, 16),
        "prefix_caching": st.booleans(),
    }
)


class Tokens(dict[str, list[int]]):
    """Generated tokens by request."""

    def hear(self, events: list[Event]) -> None:
        for event in events:
            for output in event.outputs if isinstance(event, Delivered) else ():
                self.setdefault(output.request, []).extend(output.tokens)


def generated(shape: Mapping[str, object], asked: list[tuple[Prompt, int]], *, pause_at: int | None = None, clear: bool = False) -> Tokens:
    """Run requests to their end, with a pause and a swap to the same weights after `pause_at` steps."""
    backend, tokens = TorchBackend(), Tokens()
    backend.start(EngineShape.model_validate(dict(shape)))
    for op, (prompt, most) in enumerate(asked):
        tokens.hear(backend.apply(op, Submit(id=f"r{op}", prompt=prompt, max_tokens=most)))
    steps = 0
    while backend.has_work():
        if steps == pause_at:
            for operation in (Pause(mode="keep", clear_cache=clear), SwapWeights(source=WeightSource(original=True)), Resume()):
                tokens.hear(backend.apply(100, operation))
        tokens.hear(backend.step())
        steps += 1
    backend.stop()
    return tokens


@settings(max_examples=40)
@given(asked=requests, pause_at=st.integers(1, 12), clear=st.booleans())
def test_a_pause_at_any_step_with_the_same_weights_changes_no_token(asked, pause_at: int, clear: bool) -> None:
    assert generated(ROOMY, asked, pause_at=pause_at, clear=clear) == generated(ROOMY, asked)


@settings(max_examples=40)
@given(asked=requests, shape=tight)
def test_blocks_pool_chunks_and_seats_change_no_token(asked, shape) -> None:
    assert generated(shape, asked) == generated(ROOMY, asked)


@settings(max_examples=30)
@given(asked=requests)
def test_companions_change_no_token(asked) -> None:
    together = generated(ROOMY, asked)
    for index, request in enumerate(asked):
        assert generated(ROOMY, [request])["r0"] == together[f"r{index}"]
