"""Tracer checkpoints in our engine: its tokens alone tell which weights sampled them and whether stale KV was attended to."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.events import Delivered, VersionSpan
from harness.operations import Pause, Prompt, Resume, Submit, SwapWeights, WeightSource
from harness.scenario import EngineShape

pytest.importorskip("torch")

from harness.backends.torch import TorchBackend
from harness.tracer import Decoder, Trace, make_tracer

BEFORE, AFTER = 7, 12


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def tracer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tracer") / request.param
    make_tracer(out, family=request.param, versions=2)
    return out


def trace_over_an_update(tracer: Path, *, clear_cache: bool) -> Trace:
    """What the tokens of one request tell that was frozen after `BEFORE` tokens and went on with new weights."""
    decoder = Decoder.from_folder(tracer / "v1")
    prompt = decoder.prompt(20, seed=1)
    backend = TorchBackend()
    backend.start(EngineShape(checkpoint=str(tracer / "v1"), block_size=4, num_blocks=32, max_model_len=64))
    output: list[int] = []

    def hear(events) -> None:
        output.extend(token for event in events if isinstance(event, Delivered) for out in event.outputs for token in out.tokens)

    hear(backend.apply(0, Submit(id="r1", prompt=Prompt(tokens=tuple(prompt)), max_tokens=BEFORE + AFTER)))
    for _ in range(BEFORE):
        hear(backend.step())
    new = WeightSource(checkpoint=str(tracer / "v2"))
    for op, operation in enumerate((Pause(mode="keep", clear_cache=clear_cache), SwapWeights(source=new, version="v2"), Resume()), 1):
        hear(backend.apply(op, operation))
    while backend.has_work():
        hear(backend.step())
    backend.stop()
    return decoder.decode(prompt, output)


def test_after_a_clear_new_weights_sample_over_new_kv_alone(tracer: Path) -> None:
    trace = trace_over_an_update(tracer, clear_cache=True)
    assert trace.spans == (VersionSpan("v1", 0, BEFORE), VersionSpan("v2", BEFORE, BEFORE + AFTER))
    assert trace.stale == ()
    assert trace.breaks == ()


def test_without_a_clear_every_later_token_confesses_the_stale_kv(tracer: Path) -> None:
    trace = trace_over_an_update(tracer, clear_cache=False)
    assert trace.spans == (VersionSpan("v1", 0, BEFORE), VersionSpan("v2", BEFORE, BEFORE + AFTER))
    assert trace.stale == tuple(range(BEFORE, BEFORE + AFTER))
    assert trace.breaks == ()
    stale = 20 + BEFORE - 1
    """The last token before the boundary has its KV computed after it."""
    assert all(trace.shares[BEFORE + step].holds(stale / (stale + 1 + step)) for step in range(AFTER))
