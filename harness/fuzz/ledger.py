"""What a campaign has done, line by line in its run folder: what is written here survives any kill, and is not done again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.errors import BadInput
from harness.fuzz.case import Finding
from harness.fuzz.hunt import Failed, Tally

LEDGER = "campaign.jsonl"
SCHEMA = 2


class LedgerError(BadInput):
    """The folder holds no campaign, or one that cannot be read."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a campaign is to do."""

    engine: str
    seed: int
    """The first seed; each case has the next."""
    cases: int | None = None
    """How many cases; None: until the time is up."""
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def data(self) -> dict[str, Any]:
        return {"engine": self.engine, "seed": self.seed, "cases": self.cases, "overrides": dict(self.overrides)}


class Ledger:
    """Appends to the file; each line is one write."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        self._file = (folder / LEDGER).open("a", encoding="utf-8")
        if self._file.tell() == 0:
            self._append({"schema": SCHEMA, **plan.data()})
        else:
            # A kill may have left half a line: it stays, alone, and is passed over by the reader.
            self._file.write("\n")

    def hunted(self, first: int, count: int, tally: Tally, failed: tuple[Failed, ...]) -> None:
        """These seeds were run and need not be run again."""
        sums = {"operations": tally.operations, "seconds": round(tally.seconds, 3)}
        counts = {name: dict(getattr(tally, name)) for name in ("verbs", "reached", "ended")}
        self._append({"first": first, "cases": count, **sums, **counts, "failed": [_failed_data(one) for one in failed]})

    def close(self) -> None:
        self._file.close()

    def _append(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


@dataclass(kw_only=True)
class Past:
    """What the ledger of a folder tells."""

    plan: Plan
    tally: Tally = field(default_factory=Tally)
    done: set[int] = field(default_factory=set)
    """Seeds that were run."""
    failed: list[Failed] = field(default_factory=list)


def read_ledger(folder: Path) -> Past:
    """What was done so far.

    Raises:
        LedgerError: the folder holds no campaign, or one of a newer Caesura.
    """
    path = folder / LEDGER
    try:
        lines = list(_lines(path))
    except OSError as error:
        raise LedgerError(f"{path}: {error.strerror}; expected the folder of a campaign, as `caesura fuzz` leaves in runs/") from error
    if not lines or lines[0].get("schema") != SCHEMA:
        got = lines[0].get("schema") if lines else "an empty file"
        raise LedgerError(f"{path}: expected a campaign of schema {SCHEMA}, got {got}; begin a new campaign")
    head, *hunts = lines
    past = Past(plan=Plan(engine=head["engine"], seed=head["seed"], cases=head["cases"], overrides=head["overrides"]))
    for line in hunts:
        sums = Tally(cases=line["cases"], operations=line["operations"], seconds=line["seconds"])
        for name in ("verbs", "reached", "ended"):
            getattr(sums, name).update(line[name])
        past.tally.merge(sums)
        past.done.update(range(line["first"], line["first"] + line["cases"]))
        past.failed += [_failed(one) for one in line["failed"]]
    return past


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines; half a line, left by a kill, is passed over: its seeds are run again."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            try:
                data = json.loads(line)
            except ValueError:
                continue
            if isinstance(data, dict):
                yield data


def _failed_data(failed: Failed) -> dict[str, Any]:
    return {"seed": failed.seed, "findings": [asdict(finding) for finding in failed.findings]}


def _failed(data: dict[str, Any]) -> Failed:
    return Failed(seed=data["seed"], findings=tuple(Finding(**finding) for finding in data["findings"]))
