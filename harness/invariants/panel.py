"""The judges of a whole run: each rank's log is judged by itself, what clients saw beside all of them; one verdict for each invariant."""

from __future__ import annotations

from collections.abc import Sequence

from harness.events import Entry, Opened, Reference
from harness.invariants.invariant import INVARIANTS, told_in_full
from harness.invariants.judge import ClientJudge, Judge
from harness.verdict import Judgement, Violation

CLIENT = "client"
"""The writer of what clients saw."""


def by_rank(entries: Sequence[Entry]) -> dict[str, Sequence[Entry]]:
    """Each rank's own entries by writer, in order of their names, which keep their numbers in the merged log.

    Checks of what tokens should have been belong to the ranks whoever wrote them down.
    """
    writers = sorted({entry.writer for entry in entries} - {CLIENT})
    return {writer: [e for e in entries if e.writer == writer or isinstance(e.event, Reference)] for writer in writers}


class Panel:
    """A judge for each rank, in `ranks` by writer, and one for the clients, None if none of them kept a log.

    Args:
        entries: the merged log, for which `finish` says what its judges found.
    """

    def __init__(self, entries: Sequence[Entry]) -> None:
        self._entries = entries
        self.by_rank = by_rank(entries)
        self.ranks = {writer: Judge() for writer in self.by_rank}
        self.client = ClientJudge() if any(entry.writer == CLIENT for entry in entries) else None

    def finish(self) -> list[Judgement]:
        """Judge everything: one judgement for each invariant, in the order of the registry. Call this once."""
        found: dict[str, list[Judgement]] = {id: [] for id in INVARIANTS}
        for writer, entries in self.by_rank.items():
            self.ranks[writer].feed(entries)
        if self.client is not None:
            self.client.feed(self._entries)
        for bench in (*self.ranks.values(), *([self.client] if self.client is not None else [])):
            for judgement in bench.finish():
                found[judgement.invariant].append(judgement)
        opened = next(entry.event for entry in self._entries if isinstance(entry.event, Opened))
        return [_together(judgements) if judgements else _unjudged(id, opened) for id, judgements in found.items()]


def _together(judgements: Sequence[Judgement]) -> Judgement:
    """What one invariant says about one run: violated if any judge says so, not checkable if none could say anything."""
    said = [judgement for judgement in judgements if judgement.status != "not-checkable"]
    if len(said) <= 1:
        return (said or judgements)[0]
    violations = sorted((violation for judgement in said for violation in judgement.violations), key=lambda violation: violation.seq)
    told = _told(violations)
    more = sum(judgement.more for judgement in said) + len(violations) - len(told)
    checked = sum(judgement.checked for judgement in said)
    if not violations:
        reason = next((judgement.reason for judgement in said if judgement.reason), "")
        return Judgement(invariant=said[0].invariant, status="holds", reason=reason, checked=checked)
    count = len(told) + more
    reason = f"at event {violations[0].seq}" if count == 1 else f"{count} violations, the first at event {violations[0].seq}"
    return Judgement(
        invariant=said[0].invariant,
        status="violated",
        reason=reason,
        violations=tuple(told),
        more=more,
        checked=checked,
    )


def _told(violations: Sequence[Violation]) -> list[Violation]:
    """Those told in full."""
    told: list[Violation] = []
    wordings: set[str] = set()
    for violation in violations:
        if told_in_full(violation.wording, len(told), wordings):
            told.append(violation)
    return told


def _unjudged(id: str, opened: Opened) -> Judgement:
    """No rank kept a log, and clients see nothing of this invariant."""
    reason = INVARIANTS[id].unmet(opened) or "clients see nothing of it"
    return Judgement(invariant=id, status="not-checkable", reason=reason)
