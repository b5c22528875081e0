"""Whatever is asked of it, the model loses and doubles nothing: blocks, references, tokens, endings."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import HealthCheck, given, settings

from harness.events import Accepted, Blocked, Delivered, Event, Finished, Landed, Returned
from harness.model import EngineModel
from harness.model.symbolic import symbolic_token
from harness.operations import (
    Abort,
    FinishWeightUpdate,
    Operation,
    Pause,
    Prompt,
    ResetPrefixCache,
    Resume,
    Sleep,
    Spoil,
    StartWeightUpdate,
    Step,
    Submit,
    SwapWeights,
    UpdateWeights,
    WakeUp,
    WeightSource,
)
from harness.state import EngineState

SOURCE = WeightSource(original=True)
SPOILT = [WeightSource(original=True, spoil=Spoil(tensor=tensor, how="nan")) for tensor in (0, 1)]
UNCHANGED = ("invalid", "conflict", "rejected", "out-of-service")
"""Codes of refusals that change nothing."""
IDS = st.sampled_from([f"r{index}" for index in range(6)])

submissions = st.builds(
    lambda request, tokens, seed, max_tokens, salt: Submit(
        id=request, prompt=Prompt(tokens=tokens, seed=seed), max_tokens=max_tokens, cache_salt=salt
    ),
    IDS,
    st.integers(1, 12),
    st.integers(0, 1),
    st.integers(1, 8),
    st.sampled_from([None, None, None, "salt"]),
)
steps = st.just(Step())
operations = st.one_of(
    submissions,
    submissions,
    steps,
    steps,
    steps,
    st.builds(lambda request: Abort(ids=(request,)), IDS),
    st.builds(lambda mode, clear: Pause(mode=mode, clear_cache=clear), st.sampled_from(["abort", "wait", "keep", "keep"]), st.booleans()),
    st.just(Resume()),
    st.just(ResetPrefixCache()),
    st.builds(
        lambda source, fails: SwapWeights(source=source, version="v", fails=fails),
        st.sampled_from([SOURCE, SOURCE, *SPOILT]),
        st.sampled_from([False, False, True]),
    ),
    st.builds(lambda level, mode: Sleep(level=level, mode=mode), st.integers(0, 2), st.sampled_from([None, "abort", "wait", "keep"])),
    st.builds(lambda tags: WakeUp(tags=tags), st.sampled_from([None, None, ("weights",), ("kv_cache",)])),
    st.builds(lambda unpaused: StartWeightUpdate(allow_unpaused=unpaused), st.booleans()),
    st.builds(lambda part, fails: UpdateWeights(source=SOURCE, part=part, of=2, fails=fails), st.integers(1, 2), st.just(False)),
    st.just(FinishWeightUpdate()),
)


@st.composite
def shapes(draw):
    class Shape:
        block_size = draw(st.integers(2, 4))
        num_blocks = draw(st.integers(4, 12))
        max_model_len = draw(st.integers(8, 24))
        max_num_seqs = draw(st.integers(1, 4))
        max_num_batched_tokens = draw(st.integers(4, 16))
        prefix_caching = draw(st.sampled_from([True, True, False]))
        long_prefill_token_threshold = draw(st.sampled_from([0, 0, 3]))
        late_requests = draw(st.sampled_from(["queue", "reject", "block"]))
        async_scheduling = draw(st.booleans())
        host_blocks = draw(st.sampled_from([0, 1, 3]))

    return Shape()


def check_blocks(state: EngineState) -> None:
    """Every block is free, cached or held, and only one of them; references count the holders."""
    requests = (*state.running, *state.waiting)
    holders = Counter(block for request in requests for block in request.blocks)
    assert state.references == tuple(holders[block] for block in range(len(state.references)))
    assert sorted(state.free) == [block for block, references in enumerate(state.references) if references == 0]
    labelled = Counter(block for group in state.digests for block in group)
    assert set(labelled.values()) <= {1}


def check_queues(model: EngineModel, shape) -> None:
    state = model.state()
    for request in state.running:
        assert request.status == "running" and not request.parked
        assert len(request.blocks) == -(-request.num_computed_tokens // shape.block_size)
        known = request.num_prompt_tokens + len(request.output)
        assert request.num_computed_tokens < known + request.num_output_placeholders <= shape.max_model_len
        assert request.num_output_placeholders <= 1 and (shape.async_scheduling or not request.num_output_placeholders)
        assert len(model.kv_epochs(request.id)) == request.num_computed_tokens
        assert len(model.token_versions(request.id)) == len(request.output)
    for request in state.waiting:
        assert request.status != "running" and request.blocks == ()
        assert request.num_computed_tokens == request.num_output_placeholders == 0
    assert [request.parked for request in state.waiting] == sorted(request.parked for request in state.waiting), "parked ones stand last"
    assert len(state.running) <= shape.max_num_seqs
    if state.pause_mode and not state.pause_pending:
        assert not model.has_work()
    if state.out_of_service or state.sleep_level is not None:
        assert not model.launch_due
    if state.sleep_level is not None:
        assert state.pause_mode is not None
        assert not any(state.references) or state.sleep_level == 0
    assert len(set(state.host)) == len(state.host) <= shape.host_blocks


class Ledger:
    """What callers were handed, against what was sampled."""

    def __init__(self) -> None:
        self.sampled: dict[str, list[int]] = {}
        self.delivered: dict[str, list[int]] = {}
        self.open: set[str] = set()

    def hear(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case Accepted(request=request) | Blocked(request=request):
                    if request not in self.open:
                        self.open.add(request)
                        self.sampled[request], self.delivered[request] = [], []
                case Landed(sampled=sampled):
                    for request, token in sampled:
                        self.sampled[request].append(token)
                case Delivered(outputs=outputs):
                    for output in outputs:
                        assert output.first == len(self.delivered[output.request])
                        self.delivered[output.request] += output.tokens
                case Finished(request=request, output_tokens=count, spans=spans):
                    self.open.remove(request)
                    assert count == len(self.sampled[request])
                    assert [span.start for span in spans] + [count] == [0, *(span.end for span in spans)]
                case _:
                    pass
        assert self.delivered == self.sampled


@settings(max_examples=120, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(shape=shapes(), timeline=st.lists(operations, min_size=10, max_size=50))
def test_blocks_tokens_and_endings_are_conserved(shape, timeline):
    model, ledger = EngineModel(shape), Ledger()

    def step() -> None:
        events = model.schedule() if model.launch_due else []
        if model.landing_due:
            events += model.land(lambda request, position: symbolic_token(request, position, model.epoch))
        ledger.hear(events)
        check_blocks(model.state())
        check_queues(model, shape)

    def call(op: int, operation: Operation) -> None:
        before = model.state()
        events = model.apply(op, operation)
        ledger.hear(events)
        check_blocks(model.state())
        check_queues(model, shape)
        answers = [event for event in events if isinstance(event, Returned) and event.op == op]
        if answers and answers[0].error is not None and answers[0].error.code in UNCHANGED:
            assert model.state() == before

    for op, operation in enumerate(timeline):
        if not isinstance(operation, Step):
            call(op, operation)
        elif model.has_work():
            step()

    end = len(timeline)
    back = (WakeUp(), FinishWeightUpdate(), Pause(mode="keep"), SwapWeights(source=SOURCE), FinishWeightUpdate())
    for op, operation in enumerate(back, end):
        call(op, operation)
    if model.state().update_open:
        for op, part in enumerate((1, 2), end + 5):
            call(op, UpdateWeights(source=SOURCE, part=part, of=2))
        call(end + 7, FinishWeightUpdate())
    call(end + 8, Resume())
    while model.has_work():
        step()
    state = model.state()
    assert not (state.running or state.waiting or state.blocked or ledger.open), "left running, each accepted request ends"
    assert not any(state.references)
