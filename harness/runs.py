"""The folder that a run leaves behind: `runs/<time>-<name>/`, with `runs/latest` pointing at the newest.

Names in it are fixed: events.*.jsonl, scenario.yaml, report.txt, coverage.txt.
"""

from __future__ import annotations

import os
import re
import shutil
from datetime import datetime
from pathlib import Path

from harness.errors import BadInput

SCENARIO = "scenario.yaml"
REPORT = "report.txt"
COVERAGE = "coverage.txt"


class RunFolderError(BadInput):
    """The folder cannot be made or written."""


class RunFolder:
    """A folder that holds, or will hold, one run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def make(cls, root: Path, name: str) -> RunFolder:
        """A new, empty run folder under `root`.

        Raises:
            RunFolderError: `root` cannot be written.
        """
        if (latest := root / "latest").exists() and not latest.is_symlink():
            raise RunFolderError(f"{latest} is not a link that `caesura` made: move it away, or choose another folder with --runs")
        stem = f"{datetime.now():%Y%m%d-%H%M%S}-{_slug(name)}"
        try:
            root.mkdir(parents=True, exist_ok=True)
            return cls(_make_new(root, stem))
        except OSError as error:
            raise RunFolderError(f"cannot make a run folder in {root}: {error.strerror}; choose another with --runs") from error

    def write(self, name: str, text: str) -> None:
        """Write a whole file at once: a reader sees all of it or none."""
        part = self.path / f".{name}.part"
        try:
            part.write_text(text, encoding="utf-8")
            os.replace(part, self.path / name)
        except OSError as error:
            raise RunFolderError(f"cannot write {self.path / name}: {error.strerror}") from error

    def remove(self) -> None:
        """Nothing was run: no folder is left behind."""
        shutil.rmtree(self.path)

    def publish(self) -> None:
        """Point `latest` at this folder."""
        link = self.path.parent / f".latest-{os.getpid()}"
        link.unlink(missing_ok=True)
        link.symlink_to(self.path.name)
        os.replace(link, self.path.parent / "latest")


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:48] or "run"


def _make_new(root: Path, stem: str) -> Path:
    """Runs that start in the same second get -2, -3, ..."""
    for attempt in range(1, 10_000):
        path = root / (stem if attempt == 1 else f"{stem}-{attempt}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise FileExistsError(f"10000 runs of {stem}")
