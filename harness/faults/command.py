"""The verb `drill`: which faults, what is printed while they are hunted, what is written, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.errors import BadInput
from harness.faults import CANARY
from harness.faults.drill import Drilled, Report, chosen, drill
from harness.faults.page import line, page
from harness.scenario import dump
from harness.trial import EXIT_CODES, Status
from harness.version import version


def run(ids: Sequence[str], *, third: int | None, seeds: int, minimal: Path | None, page_file: Path | None, as_json: bool) -> int:
    """Drill, report, and say by the exit code whether every fault was caught by the invariant that it names.

    Args:
        minimal: a folder for the smallest case of each fault, as a scenario file.
        page_file: where to write docs/faults.md; it needs every fault.

    Raises:
        BadInput: no such fault or third, a page that would not be whole, or a file that cannot be written.
    """
    if page_file is not None and (ids or third is not None):
        raise BadInput(f"--page {page_file}: expected no faults to be named and no --third, as the page lists what was measured of all")
    faults = chosen(ids, third=third)
    if not as_json:
        print(f"caesura {version()}, drill: {len(faults)} faults, {seeds} hunts for each, engine torch on tiny", flush=True)
    small = minimal is not None or page_file is not None
    report = drill(faults, seeds=seeds, minimal=small, hear=lambda drilled: None if as_json else print(line(drilled), flush=True))
    try:
        if minimal is not None:
            _write_minimal(minimal, report.drilled)
        if page_file is not None:
            page_file.write_text(page({one.fault.id: one for one in report.drilled}), encoding="utf-8")
    except OSError as error:
        raise BadInput(f"{error.filename} cannot be written: {error.strerror}; choose another place") from error
    print(json.dumps(_answer(report)) if as_json else _summary(report), flush=True)
    return EXIT_CODES[_status(report)]


def _status(report: Report) -> Status:
    """A canary that survives proves nothing about the others."""
    return "unknown" if report.void else "holds" if report.passed else "violated"


def _summary(report: Report) -> str:
    lines = list(report.unfaulted) or [f"without faults: clean in the same {report.unfaulted_cases} cases"]
    caught = sum(one.status == "caught" for one in report.drilled)
    verdict = {
        "holds": f"holds: {caught} faults caught, each by the invariant that it names",
        "violated": f"violated: {caught} of {len(report.drilled)} faults caught as they should be",
        "unknown": f"void: {CANARY} was not caught, so this drill says nothing",
    }[_status(report)]
    return "\n".join([*lines, verdict])


def _answer(report: Report) -> dict[str, Any]:
    return {
        "status": _status(report),
        "unfaulted": {"cases": report.unfaulted_cases, "findings": report.unfaulted},
        "faults": [
            {
                "id": one.fault.id,
                "caught_by": one.fault.caught_by,
                "shallow": one.fault.shallow,
                "status": one.status,
                "operations": one.operations,
                "minimal": one.length,
                "also": one.also,
            }
            for one in report.drilled
        ],
    }


def _write_minimal(folder: Path, drilled: Sequence[Drilled]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for one in drilled:
        if one.minimal is not None:
            (folder / f"{one.fault.name}.yaml").write_text(dump(one.minimal), encoding="utf-8")
