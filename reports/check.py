"""What `caesura check` prints: a row for each promise, then what it comes to."""

from __future__ import annotations

import json
import textwrap
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.check.inspection import Found
    from harness.check.promise import Row
    from harness.trial import Status

from harness.version import version

WIDTH = 140
WORDS = {"holds": "holds", "violated": "VIOLATED", "not-checkable": "not checkable"}
INDENT = " " * 38


def row(row: Row) -> str:
    """Verdict, id and evidence; of a violated one the promise, too."""
    head = f"{WORDS[row.verdict]:<14}{row.id:<24}"
    evidence = textwrap.wrap(row.evidence, WIDTH - len(INDENT)) or [""]
    lines = [head + evidence[0], *(INDENT + line for line in evidence[1:])]
    if row.verdict == "violated":
        lines += textwrap.wrap(f"promised: {row.promise}", WIDTH, initial_indent=INDENT, subsequent_indent=INDENT)
    return "\n".join(lines)


def summary(found: Found, url: str, status: Status, require: Sequence[str], folder: Path) -> str:
    """What was checked, and what came of it, the verdict last but for where the log is."""
    counts = Counter(row.verdict for row in found.rows)
    unseen = [row.id for row in found.rows if row.verdict == "not-checkable" and row.id in require]
    tracer = f", tracer {found.tracer}" if found.tracer else ", no tracer"
    versions = " ".join(f"{name} {text}" for name, text in found.versions.items()) or found.dialect
    lines = [
        "",
        f"caesura {version()} check {url}: {versions}, model {found.model}{tracer}, {found.seconds:.1f} s",
        *([f"stopped: {found.stopped}"] if found.stopped else []),
        *(f"NOT AS IT WAS FOUND: {sentence}" for sentence in found.left),
        f"{status}: {counts['holds']} promises hold, {counts['violated']} are violated, {counts['not-checkable']} not checkable"
        + (f" (required: {', '.join(unseen)})" if unseen else ""),
        f"log: {folder}",
        "",
    ]
    return "\n".join(lines)


def as_json(found: Found, url: str, status: Status, folder: Path) -> str:
    """The same for machines."""
    rows = [row._asdict() for row in found.rows]
    return json.dumps({"status": status, "url": url, **found._asdict(), "rows": rows, "folder": str(folder)})
