"""Recognises failures that are known: they are counted, and not reported again.

Two failures are one if they have the same signature. What is known comes from a corpus file, which campaigns add to, and from
the scenario files that fail on the engine at hand: the regressions and, of vLLM, the differences.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from harness.errors import BadInput
from harness.fuzz.case import Signature

SCHEMA = 1


class CorpusError(BadInput):
    """The file of known failures cannot be read or written."""


class Known(NamedTuple):
    """A known failure and where it is written down."""

    signature: Signature
    source: str


def read_corpus(path: Path) -> list[Known]:
    """The known failures of a corpus file; none if there is no such file yet.

    Raises:
        CorpusError: the file is not what `write_corpus` leaves.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise CorpusError(f"{path}: cannot be read as text ({error}); {_ADVICE}") from error
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark is not None else str(path)
        raise CorpusError(f"{place}: no YAML ({getattr(error, 'problem', error)}); {_ADVICE}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("failures"), list):
        raise CorpusError(f"{path}: expected `schema: {SCHEMA}` and a list `failures`, got {_shortly(data)}; {_ADVICE}")
    return [_entry(path, number, entry) for number, entry in enumerate(data["failures"], 1)]


def _entry(path: Path, number: int, entry: Any) -> Known:
    fields = ("id", "words", "source")
    if not isinstance(entry, dict) or set(entry) != set(fields) or not all(isinstance(entry[name], str) for name in fields):
        raise CorpusError(f"{path}: failure {number}: expected texts {', '.join(fields)}, got {_shortly(entry)}; {_ADVICE}")
    return Known(Signature(entry["id"], entry["words"]), entry["source"])


def write_corpus(path: Path, failures: Iterable[Known]) -> None:
    """Write the whole file anew.

    Raises:
        CorpusError: it cannot be written.
    """
    entries = [{"id": one.signature.id, "words": one.signature.words, "source": one.source} for one in failures]
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(yaml.safe_dump({"schema": SCHEMA, "failures": entries}, sort_keys=False, allow_unicode=True), encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise CorpusError(f"{path}: cannot be written: {error.strerror}") from error


def _shortly(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 60 else text[:57] + "..."


_ADVICE = "mend the file, or move it away and a new one is begun"
