"""The program in docs/python.md does what the page says."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

pytest.importorskip("torch")

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def test_the_program_of_the_page_pauses_updates_and_resumes(capsys):
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    names = {"__name__": "docs_python"}
    exec(compile(program, str(PAGE), "exec"), names)
    asyncio.run(names["main"]())  # type: ignore[operator]
    lines = capsys.readouterr().out.splitlines()
    spans = re.compile(r"length \[VersionSpan\(version='default', start=0, end=(\d+)\), VersionSpan\(version='v2', start=\1, end=200\)\]")
    assert all(spans.fullmatch(line) for line in lines[:4]), lines
    assert lines[4:] == ["v3 True"]
