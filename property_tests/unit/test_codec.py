"""The line encoding: what is folded, that folding loses nothing, what it costs."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.codec import Codec, Decode, LogError, line_schema
from harness.events import (
    SCHEMA,
    Accepted,
    Allocated,
    AnyEvent,
    Blocked,
    Closed,
    Delivered,
    Dropped,
    Event,
    Finished,
    Freed,
    Landed,
    Launched,
    Opened,
    Output,
    Preempted,
    Resumed,
    Sampled,
    Scheduled,
    Stored,
    VersionSpan,
)

ROOT = Path(__file__).parents[2]
OPENED = Opened(
    schema=SCHEMA,
    caesura="0.1.0",
    backend="sim",
    versions={},
    level=2,
    device="cpu",
    engine={},
    profile="caesura",
    eos_token_ids=(),
    scenario="",
    seed=0,
    clock_base_ns=0,
    rank=0,
)

IDS = st.sampled_from(["r1", "r2", "r3", "größe\n"])
SMALL = st.integers(0, 3)
TOKENS = st.integers(0, 99_999)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


def steady_step(step: int, at: dict[str, tuple[int, int]], tokens: Sequence[int], ends: frozenset[str] = frozenset()) -> list[Event]:
    """A step that moves each request of `at` (id -> position, output index) on by one token; `ends` finish by length."""
    between: list[Event] = []
    for request in at:
        if request in ends:
            n = at[request][1] + 1
            spans = (VersionSpan("default", 0, n),)
            between += [
                Finished(request=request, reason="length", prompt_tokens=4, output_tokens=n, spans=spans),
                Freed(request=request, head=(2,), tail=(1,)),
            ]
    rows = list(zip(at.items(), tokens, strict=True))
    return [
        Launched(step=step, batch=tuple(Scheduled(request, position, 1) for (request, (position, _)), _ in rows)),
        Landed(step=step, sampled=tuple(Sampled(request, token) for (request, _), token in rows)),
        *between,
        Delivered(
            outputs=tuple(Output(request, index, (token,), "length" if request in ends else None) for (request, (_, index)), token in rows)
        ),
    ]


def decoding(requests: Sequence[str]) -> tuple[Codec, dict[str, tuple[int, int]]]:
    """A codec that has seen step 1 prefill 4 tokens of each request, and where each is then."""
    codec = Codec()
    first = Launched(step=1, batch=tuple(Scheduled(request, 0, 4) for request in requests))
    landed = Landed(step=1, sampled=tuple(Sampled(request, 7) for request in requests))
    codec.encode(0, [OPENED, first, landed, Delivered(outputs=tuple(Output(request, 0, (7,), None) for request in requests))])
    return codec, {request: (4, 1) for request in requests}


def items(line: bytes) -> list[list]:
    """What stands in a line."""
    return msgspec.json.decode(line)[2]


def round_trip(transactions: Sequence[tuple[int, Sequence[Event]]]) -> list[bytes]:
    """Encode and decode; what comes back must equal what went in, numbers and times included."""
    writer, reader = Codec(), Codec()
    lines = []
    for t_ns, events in transactions:
        seq = writer.seq
        lines.append(writer.encode(t_ns, events))
        assert reader.decode(lines[-1]) == (seq, t_ns, tuple(events))
    return lines


ANY_KIND = [kind for kind in AnyEvent.__args__ if kind not in (Opened, Closed)]


@st.composite
def any_event(draw: st.DrawFn, kinds: Sequence[type[Event]] = tuple(ANY_KIND)) -> Event:
    kind = draw(st.sampled_from(kinds))
    return draw(st.builds(kind, **FIELDS[kind]))


def _field_strategy(kind: type[Event], field: msgspec.structs.FieldInfo) -> st.SearchStrategy:
    special = {"request": IDS, "step": SMALL, "by": st.none() | IDS if kind is Preempted else IDS}
    special |= {"operation": st.dictionaries(st.text(max_size=3), JSON, max_size=2)}
    special |= {"batch": st.lists(st.builds(Scheduled, IDS, SMALL, SMALL), max_size=3).map(tuple)}
    special |= {"sampled": st.lists(st.builds(Sampled, IDS, TOKENS), max_size=3).map(tuple)}
    if kind is Stored and field.name == "blocks":
        return st.lists(st.tuples(SMALL, SMALL), max_size=3).map(tuple)
    if field.name == "answer":
        return st.none() | st.dictionaries(st.text(max_size=3), JSON, max_size=2)
    return special.get(field.name, st.from_type(field.type))


FIELDS = {
    kind: {field.name: _field_strategy(kind, field) for field in msgspec.structs.fields(kind)}
    for kind in AnyEvent.__args__
    if kind not in (Opened, Closed)
}


@st.composite
def steady_steps(draw: st.DrawFn) -> list[tuple[int, list[Event]]]:
    """Decoding with requests that end, are preempted or begin in between, and now and then an event that deviates."""
    at: dict[str, tuple[int, int]] = {}
    transactions: list[tuple[int, list[Event]]] = [(0, [OPENED])]
    fresh, block, label = 0, 0, 0
    for step in range(1, draw(st.integers(2, 12))):
        events: list[Event] = []
        if at and draw(st.integers(0, 5)) == 0:
            events.append(Preempted(request=(victim := draw(st.sampled_from(sorted(at)))), by=None))
            del at[victim]
        if not at or draw(st.integers(0, 3)) == 0:
            at[f"r{fresh}"] = (0, 0)
            events.append(Accepted(request=f"r{fresh}", parked=False))
            fresh = (fresh + 1) % 4  # ids come again, sometimes while they run
        if draw(st.booleans()):
            request, evicted = draw(st.sampled_from(sorted(at))), draw(st.sampled_from([(), (block,), (block + 1,)]))
            events += [Allocated(request=request, blocks=(block,), evicted=evicted), Stored(request=request, blocks=((block, label),))]
            block, label = block + 1, label + draw(st.integers(0, 2))
        ends = frozenset(request for request in at if draw(st.integers(0, 5)) == 0)
        events += steady_step(step, at, [draw(TOKENS) for _ in at], ends)
        if draw(st.integers(0, 4)) == 0:
            del events[draw(st.integers(0, len(events) - 1))]
        transactions.append((step * 1_000_000, events or [draw(any_event())]))
        at = {request: (position + 1, index + 1) for request, (position, index) in at.items() if request not in ends}
    return transactions


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(any_event(), min_size=1, max_size=6), max_size=6))
def test_any_events_come_back_as_they_were(transactions: list[list[Event]]):
    round_trip([(0, [OPENED]), *enumerate(transactions)])


@settings(max_examples=150, deadline=None)
@given(steady_steps())
def test_folded_steps_come_back_as_they_were(transactions: list[tuple[int, list[Event]]]):
    round_trip(transactions)


def in_columns(events: Sequence[Event]) -> list[Event | Decode]:
    """The same, with each step in columns that can be."""
    said: list[Event | Decode] = []
    place = 0
    while place < len(events):
        step = columns_of(events[place : place + 3])
        said.append(step or events[place])
        place += 3 if step else 1
    return said


def columns_of(events: Sequence[Event]) -> Decode | None:
    match events:
        case Launched(step=step, batch=batch), Landed(step=landed, sampled=sampled), Delivered(outputs=outputs):
            requests, firsts = [row.request for row in batch], [row.first for row in batch]
            decode = Decode(step, landed, requests, firsts, [row.token for row in sampled], [output.first for output in outputs])
            same_length = len(batch) == len(sampled) == len(outputs)
            return decode if same_length and decode.events() == tuple(events) else None
    return None


BETWEEN_STEPS = [Accepted, Allocated, Blocked, Delivered, Finished, Freed, Preempted, Resumed, Stored]


@st.composite
def interrupted_decode(draw: st.DrawFn) -> list[tuple[int, list[Event]]]:
    """Steps, several in a line, mostly the last one moved on by a token, of one batch that sometimes has a request twice, whose step lands
    at once or a step later; now and then something comes between them, or an output is not the next one."""
    transactions: list[tuple[int, list[Event]]] = [(0, [OPENED])]
    step, at, outputs = 0, dict[int, tuple[str, int]](), dict[str, int]()
    for line in range(draw(st.integers(3, 10))):
        events: list[Event] = []
        for _ in range(draw(st.integers(1, 4))):
            if not at or draw(st.integers(0, 9)) == 0:
                at = dict(enumerate((request, draw(SMALL)) for request in draw(st.lists(IDS, min_size=1, max_size=3))))
            if draw(st.integers(0, 3)) == 0:
                events.append(draw(any_event(BETWEEN_STEPS)))
            step += draw(st.sampled_from([1] * 9 + [2]))
            tokens = [draw(SMALL) for _ in at]
            batch = tuple(Scheduled(request, first, 1) for request, first in at.values())
            sampled = tuple(Sampled(request, token) for (request, _), token in zip(at.values(), tokens, strict=True))
            off = draw(st.sampled_from([0] * 9 + [1]))
            handed = tuple(Output(request, outputs.get(request, 0) + off, (token,), None) for request, token in sampled)
            landed = step - draw(st.integers(0, 1))
            events += [Launched(step=step, batch=batch), Landed(step=landed, sampled=sampled), Delivered(outputs=handed)]
            outputs |= {output.request: output.first + 1 for output in handed}
            at = {place: (request, first + 1) for place, (request, first) in at.items()}
        transactions.append((line, events))
    return transactions


@settings(max_examples=300, deadline=None)
@given(steady_steps() | interrupted_decode())
def test_steps_in_columns_are_written_as_their_events_are(transactions: list[tuple[int, list[Event]]]):
    rows, columns, reader = Codec(), Codec(), Codec()
    for t_ns, events in transactions:
        line = columns.encode(t_ns, in_columns(events))
        assert line == rows.encode(t_ns, events)
        assert columns.seq == rows.seq
        assert reader.decode(line).events == tuple(events)


def test_a_request_twice_in_a_batch_counts_its_output_once():
    """A doubled request is what a log is to show: steps that were passed over must not count it twice."""
    rows, columns = Codec(), Codec()
    for codec in (rows, columns):
        codec.encode(0, [OPENED])
    for step in range(1, 5):
        decode = Decode(step, step, ["r1", "r1"], [step, step], [7, 8], [step - 1, step - 1])
        assert columns.encode(step, [decode]) == rows.encode(step, decode.events())
    resumed = [Resumed()]
    assert columns.encode(5, resumed) == rows.encode(5, resumed)
    wrong = Decode(5, 5, ["r1", "r1"], [5, 5], [7, 8], [7, 7])
    assert columns.encode(6, [wrong]) == rows.encode(6, wrong.events())


@pytest.mark.parametrize("column", ["step", "landed", "requests", "firsts", "outputs"])
def test_a_step_in_columns_that_deviates_is_written_in_full(column: str):
    codec, at = decoding(["r1", "r2"])
    step = columns_of(steady_step(2, at, [8, 9]))
    assert step is not None
    value = getattr(step, column)
    deviating = step._replace(**{column: value + 1 if isinstance(value, int) else [value[1], value[0]] if column == "requests" else [3, 3]})
    assert [item[0] for item in items(codec.encode(0, [deviating]))] == ["launched", "landed", "delivered"]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(TOKENS, min_size=2, max_size=2), min_size=1, max_size=5))
def test_steady_decode_is_its_tokens_and_no_more(steps: list[list[int]]):
    codec, at = decoding(["r1", "r2"])
    for step, tokens in enumerate(steps, start=2):
        assert items(codec.encode(step, steady_step(step, at, tokens))) == [["stepped", tokens]]
        at = {request: (position + 1, index + 1) for request, (position, index) in at.items()}


def test_steady_decode_with_a_step_in_flight_is_its_tokens_and_no_more():
    codec, at = decoding(["r1", "r2"])
    launched, _, _ = steady_step(2, at, [8, 9])
    codec.encode(0, [launched])
    transactions = []
    for step in range(3, 6):
        _, landed, delivered = steady_step(step - 1, at, [8, 9])
        at = {request: (position + 1, index + 1) for request, (position, index) in at.items()}
        launched, _, _ = steady_step(step, at, [8, 9])
        transactions.append((step, [launched, landed, delivered]))
        assert items(codec.encode(*transactions[-1])) == [["overlapped", [8, 9]]]


def test_a_step_in_flight_comes_back_as_it_was():
    at = {"r1": (4, 1), "r2": (4, 1)}
    prefill = Launched(step=1, batch=(Scheduled("r1", 0, 4), Scheduled("r2", 0, 4)))
    first = [OPENED, prefill, Landed(step=1, sampled=(Sampled("r1", 7), Sampled("r2", 7)))]
    handed = Delivered(outputs=(Output("r1", 0, (7,), None), Output("r2", 0, (7,), None)))
    launched, landed, delivered = steady_step(2, at, [8, 9])
    ahead, *_ = steady_step(3, {"r1": (5, 2), "r2": (5, 2)}, [10, 11])
    [*_, line, dropping] = round_trip(
        [
            (0, [*first, handed]),
            (1, [launched]),
            (2, [ahead, landed, delivered]),
            (3, [Landed(step=3, sampled=(Sampled("r1", 10),)), Dropped(step=3, request="r2", why="aborted")]),
        ]
    )
    assert items(line) == [["overlapped", [8, 9]]]
    assert items(dropping)[1] == ["dropped", 3, "r2", "aborted"]


def test_a_request_that_ends_leaves_its_step_and_the_next_one_folded():
    codec, at = decoding(["r1", "r2"])
    freed = ["freed", "r1", [2], [1]]
    finished = ["finished", "r1", "length", 4, 2, [["default", 0, 2]]]
    assert items(codec.encode(0, steady_step(2, at, [8, 9], frozenset(["r1"])))) == [["ended", [8, 9], [finished, freed]]]
    assert items(codec.encode(0, steady_step(3, {"r2": (5, 2)}, [10]))) == [["stepped", [10]]]


def test_a_preempted_request_leaves_the_next_step_folded():
    codec, at = decoding(["r1", "r2"])
    assert items(codec.encode(0, [Preempted(request="r2", by="r1"), *steady_step(2, {"r1": at["r1"]}, [8])]))[1:] == [["stepped", [8]]]


@pytest.mark.parametrize("again", ["accepted", "blocked"])
def test_an_id_that_is_used_again_counts_its_output_from_zero(again: str):
    codec, _ = decoding(["r1"])
    [kind] = [kind for kind in AnyEvent.__args__ if kind.__struct_config__.tag == again]
    events = [kind(request="r1", parked=False) if kind is Accepted else kind(request="r1")]
    assert items(codec.encode(0, [*events, *steady_step(2, {"r1": (4, 0)}, [8])]))[1:] == [["stepped", [8]]]


def _deviations() -> dict[str, list[Event]]:
    launched, landed, delivered = steady_step(2, {"r1": (4, 1), "r2": (4, 1)}, [8, 9])
    assert isinstance(launched, Launched) and isinstance(landed, Landed) and isinstance(delivered, Delivered)
    change = msgspec.structs.replace
    return {
        "step skipped": [change(launched, step=3), change(landed, step=3), delivered],
        "landed as another step": [launched, change(landed, step=3), delivered],
        "request missing from the batch": [change(launched, batch=launched.batch[:1]), landed, delivered],
        "two tokens scheduled": [change(launched, batch=(launched.batch[0], Scheduled("r2", 4, 2))), landed, delivered],
        "batch in another order": [change(launched, batch=launched.batch[::-1]), landed, delivered],
        "tokens in another order": [launched, change(landed, sampled=landed.sampled[::-1]), delivered],
        "one request sampled nothing": [launched, change(landed, sampled=landed.sampled[:1]), delivered],
        "an output lost": [launched, landed, change(delivered, outputs=delivered.outputs[:1])],
        "an output doubled": [launched, landed, change(delivered, outputs=(*delivered.outputs, delivered.outputs[0]))],
        "another token delivered": [launched, landed, change(delivered, outputs=(Output("r1", 1, (7,), None), delivered.outputs[1]))],
        "an output index skipped": [launched, landed, change(delivered, outputs=(Output("r1", 2, (8,), None), delivered.outputs[1]))],
        "a finish reason without finished": [
            launched,
            landed,
            change(delivered, outputs=(Output("r1", 1, (8,), "stop"), delivered.outputs[1])),
        ],
        "not delivered": [launched, landed],
        "not landed": [launched],
        "an event between": [launched, landed, Stored(request="r1", blocks=()), delivered],
    }


@pytest.mark.parametrize("what", _deviations())
def test_what_deviates_from_steady_decode_is_written_in_full(what: str):
    codec, _ = decoding(["r1", "r2"])
    events = _deviations()[what]
    line = codec.encode(0, events)
    assert msgspec.json.decode(line, type=tuple[int, int, tuple[AnyEvent, ...]])[2] == tuple(events)


@pytest.mark.parametrize(
    ("event", "item"),
    [
        (Allocated(request="r1", blocks=(5,), evicted=()), ["took", "r1", 5]),
        (Allocated(request="r1", blocks=(5,), evicted=(5,)), ["retook", "r1", 5]),
        (Allocated(request="r1", blocks=(5, 6), evicted=(5,)), ["allocated", "r1", [5, 6], [5]]),
        (Stored(request="r1", blocks=((5, 3),)), ["filled", "r1", 5]),
        (Stored(request="r1", blocks=((5, 2),)), ["stored", "r1", [[5, 2]]]),
        (Stored(request="r1", blocks=((5, 3), (6, 4))), ["stored", "r1", [[5, 3], [6, 4]]]),
    ],
)
def test_single_blocks_and_new_labels_are_short(event: Event, item: list):
    before = [OPENED, Stored(request="r0", blocks=((0, 2), (1, 1)))]
    [_, line] = round_trip([(0, before), (0, [event])])
    assert items(line) == [item]


@pytest.mark.parametrize(("running", "most"), [(16, 12), (1, 60)])
def test_a_token_of_steady_decode_costs_few_bytes(running: int, most: int):
    benchmark = _load_benchmark()
    codec, size, tokens = Codec(), 0, 0
    for step, (t_ns, events) in enumerate(benchmark.decode_stream(running)):
        line = codec.encode(t_ns, events)
        if step == 300:
            codec.seq = benchmark.MEASURED_FROM
        elif step > 300:
            size, tokens = size + len(line), tokens + running
        if step == 600:
            break
    assert size / tokens <= most


def _load_benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("log_size", ROOT / "benchmarks/log_size.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_folded_step_with_a_token_too_few_is_an_error():
    _, at = decoding(["r1", "r2"])
    codec = Codec()
    codec.decode(Codec().encode(0, [OPENED, *steady_step(1, at, [8, 9])]))
    with pytest.raises(LogError, match="expected 2 tokens, one for each request of the last batch that still runs, got 1"):
        codec.decode(b'[4,0,[["stepped",[8]]]]')


def test_the_committed_schema_is_current():
    committed = (ROOT / "docs/events.schema.json").read_text(encoding="utf-8")
    assert committed == line_schema(), (
        "harness/events.py or harness/codec.py changed: write it anew with "
        "python -c 'from harness.codec import line_schema; print(line_schema(), end=\"\")' > docs/events.schema.json"
    )
