"""The oracle: what each token should have been, recomputed from the log.

Two promises fix the number that an engine samples by. After a clear, and where no weight
update was crossed, a token is that of a fresh engine on the weights that sampled it. Without
a clear it is that of a *mixed replay*: each KV entry is determined by its token, its position,
the weights that computed it and the entries it attended to then, all of which the log tells.
(The last token sampled before an update has its KV computed after it, and after a preemption,
an eviction or a prefix hit "old before, new after" is wrong.)

`references` derives from a log what has to be recomputed and has a `Calculator` do it, one
request at a time: an engine's model code, without its scheduler and its pool. Every token is
given the logged ones before it, so that the first wrong one stands out and the rest can
still be judged: that all are equal means the same as decoding freely to the same end.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Literal, NamedTuple, Protocol

from harness.events import (
    Accepted,
    Blocked,
    Entry,
    Landed,
    Launched,
    Loaded,
    Offloaded,
    PartReceived,
    PauseEffective,
    Received,
    Reference,
    Returned,
)
from harness.operations import Operation, ResetPrefixCache, Submit, SwapWeights, UpdateWeights, WeightSource
from harness.replay import NEVER, Replay, Request

Kind = Literal["fresh", "mixed", "unpaused"]


class Part(NamedTuple):
    """Weights that were written: part `part` of `of` of a source's tensors."""

    source: WeightSource
    part: int
    of: int


class Calculator(Protocol):
    """A model on its first weights, with room for the KV of so many tokens, each at a slot of its own."""

    def write(self, part: Part) -> None:
        """Write these weights over the resident ones."""
        ...

    def compute(self, submit: Submit, token_ids: Sequence[int], *, first: int, slots: Sequence[int], wanted: int) -> Sequence[int]:
        """Compute consecutive tokens of a request.

        Args:
            submit: how the request samples.
            token_ids: what is computed, from position `first` on.
            slots: where the KV of its tokens lies, from position 0 to the last one computed.
            wanted: how many of the last of them are followed by a token that is asked for.

        Returns:
            For each of these, the token that comes next.
        """
        ...


class MakeCalculator(Protocol):
    def __call__(self, num_slots: int) -> Calculator: ...


class Row:
    """One token's forward pass: it wrote one KV entry."""

    __slots__ = ("life", "order", "position", "revision", "slot")

    def __init__(self, life: Life, position: int, revision: int, order: int) -> None:
        self.life = life
        self.position = position
        self.revision = revision
        """How many parts of weights had been written."""
        self.order = order
        """Rows of the log counted from 0."""
        self.slot = NEVER


class Life:
    """A request between an admission and the loss of its blocks. The row at position p attended to `rows[: p + 1]`."""

    __slots__ = ("history", "rows")

    def __init__(self, history: History) -> None:
        self.history = history
        self.rows: list[Row] = []
        """By position; those that were hit in the cache belong to other lives."""


class Sample(NamedTuple):
    """Where an output token came from."""

    row: Row
    pure: bool
    """Promised: every entry that the row attended to is of the weights that sampled."""


class History:
    """A request with all that was computed for it."""

    __slots__ = ("life", "lived", "nth", "request", "samples", "submit")

    def __init__(self, request: Request, submit: Submit, nth: int) -> None:
        self.request = request
        self.submit = submit
        self.nth = nth
        self.samples: list[Sample] = []
        """One for each output token."""
        self.life = Life(self)
        self.lived = 0
        """Number of the life that `life` is."""


class Lineage:
    """Reads a log and keeps, for every KV entry, what computed it and what it attended to."""

    def __init__(self) -> None:
        self.replay = Replay()
        self.histories: list[History] = []
        self.parts: list[Part] = []
        """Weights in the order in which they were written."""
        self._current: dict[str, History] = {}
        self._submits: dict[str, int] = {}
        self._operation: Operation | None = None
        self._written: dict[tuple[int, int], Row] = {}
        """By block and offset."""
        self._copies: dict[int, dict[int, Row]] = {}
        """By slot of the host tier: what it holds, by offset."""
        self._num_rows = 0
        self._sampling: dict[tuple[int, str], Sample] = {}
        self._promise = NEVER
        """Number of the last event that promised an empty cache."""
        self._last_older = NEVER
        """Number of the last `launched` on other weights than the resident ones."""

    def read(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if isinstance(entry.event, PauseEffective | Returned):
                self._note_promise(entry)
            self.replay.apply(entry)
            match entry.event:
                case Received(op=op):
                    call = self.replay.calls.get(op)
                    self._operation = call.operation if call else None
                case Accepted(request=id) | Blocked(request=id):
                    self._begin(id)
                case Offloaded(blocks=pairs):
                    for block, slot in pairs:
                        offsets = range(self.replay.blocks.size)
                        self._copies[slot] = {offset: row for offset in offsets if (row := self._written.get((block, offset))) is not None}
                case Loaded(blocks=pairs):
                    for slot, block in pairs:
                        self._written.update({(block, offset): row for offset, row in self._copies.get(slot, {}).items()})
                case Launched() as launched:
                    self._compute(launched)
                case Landed() as landed:
                    for id, _ in landed.sampled:
                        if (sample := self._sampling.pop((landed.step, id), None)) is not None:
                            self._current[id].samples.append(sample)
                case PartReceived(part=number, of=of):
                    self._write(number, of)

    def _note_promise(self, entry: Entry) -> None:
        """As the invariant cache-epoch has it: what counts is what was asked for, not what was done."""
        match entry.event:
            case PauseEffective(clear_cache=done):
                if done or any(call.clear_cache for call in self.replay.pauses.values()):
                    self._promise = entry.seq
            case Returned(op=op, error=None):
                call = self.replay.calls.get(op)
                if call is not None and isinstance(call.operation, ResetPrefixCache):
                    self._promise = max(self._promise, call.taken_up)

    def _begin(self, id: str) -> None:
        request = self.replay.requests[id]
        known = self._current.get(id)
        if (known is not None and known.request is request) or not isinstance(self._operation, Submit) or request.prompt is None:
            return
        nth = self._submits[id] = self._submits.get(id, 0) + 1
        self._current[id] = history = History(request, self._operation, nth)
        self.histories.append(history)

    def _write(self, number: int, of: int) -> None:
        assert isinstance(self._operation, UpdateWeights | SwapWeights), self._operation
        self.parts.append(Part(self._operation.source, number, of))
        self._last_older = self.replay.last_launched

    def _compute(self, launched: Launched) -> None:
        """A step's rows: all entries of a layer are written before its first is read, so rows may hit those before them."""
        samplers = self.replay.flights[launched.step].samplers
        pure = self._last_older == NEVER or self._last_older < self._promise
        for id, first, count in launched.batch:
            if (history := self._current.get(id)) is None:
                continue
            life = self._life(history, first)
            for position in range(first, first + count):
                life.rows.append(self._row(life, position))
            if id in samplers:
                self._sampling[launched.step, id] = Sample(life.rows[-1], pure)

    def _life(self, history: History, first: int) -> Life:
        """The request's present life, with its rows at the positions before `first`: those of a new one were hit in the cache."""
        request = history.request
        if history.lived != request.lives:
            history.lived, history.life = request.lives, Life(history)
        life = history.life
        del life.rows[first:]
        for position in range(len(life.rows), first):
            # What was never written cannot be recomputed as it was; the request's own token stands in.
            life.rows.append(self._written.get(self._place(request, position)) or self._row(life, position))
        return life

    def _row(self, life: Life, position: int) -> Row:
        row = Row(life, position, len(self.parts), self._num_rows)
        self._num_rows += 1
        self._written[self._place(life.history.request, position)] = row
        return row

    def _place(self, request: Request, position: int) -> tuple[int, int]:
        """Block and offset; a place of no block where a wrong engine computes what it has no block for."""
        index, offset = divmod(position, self.replay.blocks.size)
        return request.blocks[index] if index < len(request.blocks) else NEVER, offset


class Found(NamedTuple):
    """A token as it should have been, and how that was found."""

    kind: Kind
    revision: int
    token: int


class Run(NamedTuple):
    """Consecutive rows on the same weights, computed in one go, and the output tokens that are asked for."""

    revision: int
    order: int
    history: History
    first: int
    slots: list[int]
    """Of positions 0 to the last one computed."""
    asked: dict[int, Kind]
    """By output index."""


def references(entries: Iterable[Entry], make: MakeCalculator) -> list[Reference]:
    """What every output token of a log should have been, as `reference` events in the order of the requests.

    Args:
        entries: a log that shows blocks, each step landed before the next is launched.
        make: a calculator on the weights that the log began with.
    """
    lineage = Lineage()
    lineage.read(entries)
    mixed, num_mixed = _mixed_runs(lineage.histories)
    runs = sorted([*_pure_runs(lineage.histories, num_mixed), *mixed], key=lambda run: (run.revision, run.order))
    if not runs:
        return []
    calculator = make(num_mixed + max(len(run.slots) for run in runs))
    found: dict[History, dict[int, Found]] = {history: {} for history in lineage.histories}
    revision = 0
    for run in runs:
        for part in lineage.parts[revision : run.revision]:
            calculator.write(part)
        revision = run.revision
        found[run.history].update(_calculated(run, calculator))
    return [reference for history, tokens in found.items() for reference in _told(history, tokens)]


def _pure_runs(histories: Sequence[History], scratch: int) -> Iterator[Run]:
    """Everything up to the last token of a stretch, on the weights of that stretch: nothing is shared or kept.

    Args:
        scratch: the first slot that the mixed replay does not use.
    """
    for history in histories:
        tokens = enumerate(history.samples)
        for (pure, revision), group in groupby(tokens, key=lambda item: (item[1].pure, item[1].row.revision)):
            indices = [index for index, _ in group]
            if pure:
                kind: Kind = "unpaused" if indices[0] == 0 else "fresh"
                end = len(history.request.prompt or ()) + indices[-1]
                yield Run(revision, NEVER, history, 0, list(range(scratch, scratch + end)), dict.fromkeys(indices, kind))


def _mixed_runs(histories: Sequence[History]) -> tuple[list[Run], int]:
    """The rows that tokens without the promise of a clear depend on, and how many slots they need."""
    asked: dict[Row, int] = {}
    for history in histories:
        asked.update({sample.row: index for index, sample in enumerate(history.samples) if not sample.pure})
    ends = _needed(asked)
    own = {life: [row for row in life.rows[:end] if row.life is life] for life, end in ends.items()}
    for slot, row in enumerate(row for rows in own.values() for row in rows):
        row.slot = slot
    runs = []
    for life, rows in own.items():
        for revision, group in groupby(rows, key=lambda row: row.revision):
            stretch = list(group)
            first, last = stretch[0], stretch[-1]
            slots = [row.slot for row in life.rows[: last.position + 1]]
            wanted: dict[int, Kind] = {asked[row]: "mixed" for row in stretch if row in asked}
            runs.append(Run(revision, first.order, life.history, first.position, slots, wanted))
    return runs, sum(map(len, own.values()))


def _needed(rows: Iterable[Row]) -> dict[Life, int]:
    """For each life that these rows depend on, the number of its leading positions that they need."""
    ends: dict[Life, int] = {}
    todo = list(rows)
    while todo:
        row = todo.pop()
        life, known = row.life, ends.get(row.life, 0)
        if row.position >= known:
            ends[life] = row.position + 1
            todo += [other for other in life.rows[known : row.position + 1] if other.life is not life]
    return ends


def _calculated(run: Run, calculator: Calculator) -> dict[int, Found]:
    """By output index, the tokens that a run was asked for."""
    request = run.history.request
    prompt, end = len(request.prompt or ()), len(run.slots)
    from_index = min(run.asked, default=end - prompt + 1)
    token_ids = request.tokens(run.first, end)
    wanted = end - prompt + 1 - from_index
    tokens = calculator.compute(run.history.submit, token_ids, first=run.first, slots=run.slots, wanted=wanted)
    return {index: Found(kind, run.revision, tokens[index - from_index]) for index, kind in run.asked.items()}


def _told(history: History, found: dict[int, Found]) -> Iterator[Reference]:
    """One event for each stretch of one kind on the same weights."""
    for _, group in groupby(sorted(found.items()), key=lambda item: item[1][:2]):
        stretch = list(group)
        first, (kind, _, _) = stretch[0]
        tokens = tuple(token for _, (_, _, token) in stretch)
        yield Reference(request=history.request.id, nth=history.nth, kind=kind, first=first, tokens=tokens)
