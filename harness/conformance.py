"""Does the model explain this log? If not: the first event that it cannot explain.

The model is given each operation and each sampled token, and must agree on all
else: who was scheduled, from where, in which blocks, what was freed, in which
order, what was answered. Its transactions are compared with the log's event by
event; in lockstep the engine's whole visible state is compared too. When a step
is launched and when one lands is the model's to say as well: under asynchronous
scheduling `launched` of step n + 1 comes before `landed` of step n.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from harness.events import Called, Closed, Differed, Entry, Event, Landed, Opened, Reference, StepFailed, comparable
from harness.model import EngineModel, Profile
from harness.operations import from_data, in_words
from harness.scenario import EngineShape
from harness.state import EngineState, differences

NO_TOKEN = -1
"""Given to the model where the log has no token for a request, so that `landed` differs."""


class Mismatch(msgspec.Struct, frozen=True, kw_only=True):
    """Where the log and the model part."""

    seq: int
    """Event number of the first event that is not explained, or of the last one before a state that is not."""
    sentence: str
    expected: str
    """What the model allows there."""
    got: str


class Explanation(msgspec.Struct, frozen=True, kw_only=True):
    """How much was explained, and the first thing that was not."""

    transactions: int
    """Operations and steps."""
    events: int
    states: int
    """Whole visible states compared, each after one operation or step; 0 if the log is all there is."""
    mismatch: Mismatch | None


def together(explanations: Sequence[Explanation]) -> Explanation:
    """Of the logs of several ranks: what was explained of all of them, and what was not first."""
    mismatches = [explanation.mismatch for explanation in explanations if explanation.mismatch is not None]
    return Explanation(
        transactions=sum(explanation.transactions for explanation in explanations),
        events=sum(explanation.events for explanation in explanations),
        states=sum(explanation.states for explanation in explanations),
        mismatch=min(mismatches, key=lambda mismatch: mismatch.seq, default=None),
    )


class Explainer:
    """Follows an engine with the model, a transaction or a whole log at a time, up to the first mismatch.

    Args:
        cut: the log was cut on purpose, perhaps in the middle of a transaction: it is not held against it that it ends there.
    """

    def __init__(self, *, cut: bool = False) -> None:
        self.mismatch: Mismatch | None = None
        self.differed: Differed | None = None
        """The difference of a whole state that was found: for the log, since no event shows it."""
        self._cut = cut
        self._broken = False
        """A forward pass broke: of a state in the middle of a step the model says nothing."""
        self._transactions = self._events = self._states = 0
        self._last_seq = -1

    @property
    def explanation(self) -> Explanation:
        return Explanation(transactions=self._transactions, events=self._events, states=self._states, mismatch=self.mismatch)

    def feed(self, entries: Sequence[Entry]) -> None:
        """Explain whole transactions; after a mismatch, nothing more is compared.

        Raises:
            ValueError: the log is not one that the model can follow (unknown profile or operation, invalid engine shape).
        """
        index = 0
        while index < len(entries) and self.mismatch is None:
            index = self._transaction(entries, index)

    def compare_state(self, got: EngineState) -> None:
        """Compare the engine's visible state with the model's, after the transaction fed last."""
        if self.mismatch is not None or self._broken:
            return
        self._states += 1
        expected = self._model.state()
        if expected == got:
            return
        places = tuple((place, str(want), str(have)) for place, want, have in differences(expected, got))
        self.differed = Differed(event=self._last_seq, places=places)
        self._note_difference(self.differed)

    def _note_difference(self, differed: Differed) -> None:
        places = differed.places
        self.mismatch = Mismatch(
            seq=differed.event,
            sentence=f"after this event the visible state differs in {', '.join(place for place, _, _ in places)}",
            expected="; ".join(f"{place} {want}" for place, want, _ in places),
            got="; ".join(f"{place} {have}" for place, _, have in places),
        )

    def _transaction(self, entries: Sequence[Entry], index: int) -> int:
        """Explain the transaction that begins at `index`, or the half of a step; returns where the next one begins."""
        entry = entries[index]
        match entry.event:
            case Opened() as opened:
                self._open(opened)
            case Closed() | Reference():
                pass
            case Differed() as differed:
                self._note_difference(differed)
            case StepFailed():
                self._broken = True
            case Called(op=op, operation=data):
                self._transactions += 1
                self._explained(entry)
                operation = from_data(data)
                return self._compare(entries, index + 1, self._model.apply(op, operation), during=in_words(operation))
            case _:
                self._transactions += 1
                return self._step(entries, index)
        self._explained(entry)
        return index + 1

    def _open(self, opened: Opened) -> None:
        shape = EngineShape.model_validate(opened.engine)
        self._model = EngineModel(shape, profile=Profile.named(opened.profile), eos_token_ids=opened.eos_token_ids)

    def _step(self, entries: Sequence[Entry], index: int) -> int:
        if not self._model.has_work():
            self._part(entries[index], "nothing but a call: no step is allowed here", "a step where the engine has no work")
            return index
        if self._model.look_due:
            return self._compare(entries, index, self._model.look(), during="a look for work")
        if self._model.launch_due:
            index = self._compare(entries, index, self._model.schedule(), during="a step")
        if self.mismatch is not None or not self._model.landing_due:
            return index
        if index < len(entries) and isinstance(entries[index].event, Called | StepFailed):
            return index  # A live engine takes calls up between the launch of a step and the next landing, and a launch may break.
        tokens = _next_tokens(entries, index)
        return self._compare(entries, index, self._model.land(lambda request, _: tokens.get(request, NO_TOKEN)), during="a step")

    def _compare(self, entries: Sequence[Entry], index: int, predicted: Sequence[Event], *, during: str) -> int:
        for expected in predicted:
            if index >= len(entries):
                self._ends_early(expected, during)
                return index
            if expected != entries[index].event and comparable(expected) != comparable(entries[index].event):
                self._part(entries[index], repr(expected), f"the model allows another event here, during {during}")
                return index
            self._explained(entries[index])
            index += 1
        return index

    def _ends_early(self, expected: Event, during: str) -> None:
        if not self._cut:
            sentence = f"the log has no further event, in the middle of {during}"
            self.mismatch = Mismatch(seq=self._last_seq, sentence=sentence, expected=repr(expected), got="nothing")

    def _explained(self, entry: Entry) -> None:
        self._events += 1
        self._last_seq = entry.seq

    def _part(self, entry: Entry, expected: str, sentence: str) -> None:
        self.mismatch = Mismatch(seq=entry.seq, sentence=sentence, expected=expected, got=repr(entry.event))


def _next_tokens(entries: Sequence[Entry], index: int) -> dict[str, int]:
    """What the step sampled whose landing comes next, by request."""
    for place in range(index, len(entries)):
        if isinstance(landed := entries[place].event, Landed):
            return dict(landed.sampled)
    return {}


def explain(entries: Sequence[Entry]) -> Explanation:
    """Explain a whole log, events only."""
    explainer = Explainer()
    explainer.feed(entries)
    return explainer.explanation
