"""A log judged from its file, stretches of steps at once, has the verdict, the situations and the end of one that is stepped through."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.backends.sim import SimBackend
from harness.coverage import Situations
from harness.events import Allocated, Delivered, Event, Landed, Launched, Sampled, Stored
from harness.fuzz.case import Case, run_case
from harness.invariants import Judge
from harness.invariants.file import judge_file
from harness.log import LogWriter, read_log
from harness.operations import Abort, Advance, Operation, Pause, Perturbation, Prompt, Resume, Submit, SwapWeights, WeightSource
from harness.replay import Replay
from harness.scenario import EngineShape


def decoding(seed: int) -> Sequence[Event]:
    """The log of a few long answers, with pauses, updates and aborts between."""
    draw = random.Random(seed)
    size = draw.choice((2, 4, 16))
    shape = EngineShape(
        block_size=size,
        num_blocks=draw.randint(80, 200) // size,
        max_model_len=draw.choice((60, 80)),
        max_num_seqs=4,
        max_num_batched_tokens=64,
        async_scheduling=draw.random() < 0.1,
    )
    operations: list[Operation] = []
    for number in range(draw.randint(1, 5)):
        prompt = Prompt(tokens=draw.randint(1, 20), seed=draw.randint(0, 1))
        operations.append(Submit(id=f"r{number}", prompt=prompt, max_tokens=draw.randint(1, 60)))
        operations.append(Advance(steps=draw.randint(1, 25)))
        if draw.random() < 0.4:
            source = WeightSource(perturb=Perturbation(seed=number, scale=0.1))
            operations += [Pause(mode="keep", clear_cache=draw.random() < 0.5), SwapWeights(source=source, version=f"v{number}"), Resume()]
        if draw.random() < 0.2:
            operations.append(Abort(ids=(f"r{draw.randint(0, number)}",)))
    outcome = run_case(Case(engine=shape, operations=tuple(operations)), SimBackend())
    return [entry.event for entry in outcome.entries]


def spoilt(events: Sequence[Event], draw: random.Random) -> list[Event]:
    """The log with something wrong in it: an event lost, doubled, moved, or with another block, label or token."""
    bad = list(events)
    for _ in range(draw.randint(1, 3)):
        at = draw.randrange(1, len(bad) - 1)
        event = bad[at]
        match draw.randrange(4):
            case 0:
                del bad[at]
            case 1:
                bad.insert(at, event)
            case 2:
                bad[at], bad[at - 1] = (bad[at - 1], event) if at > 1 else (event, bad[at - 1])
            case _:
                bad[at] = _altered(event, draw)
        if len(bad) < 4:
            break
    return bad


def _altered(event: Event, draw: random.Random) -> Event:
    match event:
        case Allocated(blocks=blocks):
            return msgspec.structs.replace(event, blocks=tuple(draw.choice((block, block + 1)) for block in blocks))
        case Stored(blocks=blocks):
            return msgspec.structs.replace(event, blocks=tuple((block, max(label - draw.randint(0, 1), 0)) for block, label in blocks))
        case Landed(sampled=sampled):
            return msgspec.structs.replace(event, sampled=tuple(Sampled(id, token + draw.randint(0, 1)) for id, token in sampled))
        case Delivered(outputs=outputs):
            return msgspec.structs.replace(event, outputs=tuple(one._replace(first=one.first + draw.randint(0, 1)) for one in outputs))
        case Launched(batch=batch):
            return msgspec.structs.replace(event, batch=tuple(row._replace(first=row.first + draw.randint(0, 1)) for row in batch))
    return event


def joined(folder: Path, events: Sequence[Event]) -> Path:
    """The events as a file, each step's in one line, so that steady ones are folded."""
    lines: list[list[Event]] = []
    for event in events:
        follows = isinstance(event, Landed | Delivered) and lines and isinstance(lines[-1][-1], Launched | Landed)
        blocks = lines and isinstance(lines[-1][-1], Allocated | Stored) and isinstance(event, Allocated | Stored | Launched)
        if follows or blocks:
            lines[-1].append(event)
        else:
            lines.append([event])
    with LogWriter(folder) as writer:
        for number, line in enumerate(lines):
            writer.append(number, line)
    return writer.path


def _watched() -> tuple[Judge, Situations]:
    judge = Judge()
    situations = Situations(judge.replay)
    judge.add_watcher(situations)
    return judge, situations


def _the_same(path: Path) -> None:
    stepped, met_stepping = _watched()
    stepped.feed(read_log(path).entries)
    quick, met = _watched()
    judge_file(path, quick)
    assert met.coverage == met_stepping.coverage
    assert quick.replay.state() == stepped.replay.state()
    assert _last_step(quick.replay) == _last_step(stepped.replay)
    assert {id: request.spans() for id, request in quick.replay.requests.items()} == {
        id: request.spans() for id, request in stepped.replay.requests.items()
    }
    assert quick.replay.blocks.written == stepped.replay.blocks.written
    assert quick.finish() == stepped.finish()


def _last_step(replay: Replay) -> object:
    flight = replay.last_landed
    return flight and (replay.last_launched, flight.launched, flight.step, flight.batch, flight.samplers, flight.weights)


def test_steps_that_take_and_fill_blocks_are_taken_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pool that is full of cached blocks, too: of some hundred steps few are judged event by event."""
    shape = EngineShape(block_size=4, num_blocks=40, max_model_len=160, max_num_seqs=4, max_num_batched_tokens=64)
    operations = [Submit(id=f"r{i}", prompt=Prompt(tokens=5 + i % 3, seed=i), max_tokens=40) for i in range(12)]
    outcome = run_case(Case(engine=shape, operations=tuple(operations)), SimBackend())
    path = joined(tmp_path, [entry.event for entry in outcome.entries])
    launched = sum(isinstance(entry.event, Launched) for entry in outcome.entries)
    in_full: list[int] = []
    apply = Judge.apply

    def counting(judge: Judge, seq: int, event: Event) -> None:
        in_full.append(isinstance(event, Launched))
        apply(judge, seq, event)

    monkeypatch.setattr(Judge, "apply", counting)
    judge_file(path, Judge())
    assert any(isinstance(entry.event, Allocated) and entry.event.evicted for entry in outcome.entries)
    assert sum(in_full) < launched / 5, f"{sum(in_full)} of {launched} steps one by one"


@given(seed=st.integers(0, 2**32))
def test_a_right_log(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    _the_same(joined(tmp_path_factory.mktemp("log"), decoding(seed)))


@given(seed=st.integers(0, 2**32))
def test_a_wrong_log(tmp_path_factory: pytest.TempPathFactory, seed: int) -> None:
    events = decoding(seed)
    bad = spoilt(events[:-1], random.Random(seed + 1))
    _the_same(joined(tmp_path_factory.mktemp("log"), bad))
