"""JUnit XML, as CI systems read it, from `run` and `fuzz`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple
from xml.etree import ElementTree

from harness.errors import BadInput


class TestCase(NamedTuple):
    """One line of CI's list of tests."""

    name: str
    failure: str | None = None
    """What was wrong; None: nothing."""
    seconds: float = 0.0
    kind: Literal["failure", "skipped"] = "failure"
    """Whether `failure` says what failed, or why nothing could be judged."""


def write_junit(path: Path, suite: str, cases: Sequence[TestCase]) -> None:
    """Write one suite of tests.

    Raises:
        BadInput: the file cannot be written.
    """
    failures = sum(case.failure is not None and case.kind == "failure" for case in cases)
    skipped = sum(case.failure is not None and case.kind == "skipped" for case in cases)
    counts = {"tests": str(len(cases)), "failures": str(failures), "errors": "0", "skipped": str(skipped)}
    root = ElementTree.Element("testsuite", {"name": suite, **counts, "time": f"{sum(case.seconds for case in cases):.3f}"})
    for case in cases:
        element = ElementTree.SubElement(root, "testcase", {"classname": suite, "name": _clean(case.name), "time": f"{case.seconds:.3f}"})
        if case.failure is not None:
            text = _clean(case.failure)
            ElementTree.SubElement(element, case.kind, {"message": text.partition("\n")[0]}).text = text
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        ElementTree.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)
    except OSError as error:
        raise BadInput(f"--junit {path}: cannot be written: {error.strerror}") from error


def _clean(text: str) -> str:
    """Without the control characters that XML cannot hold."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)
