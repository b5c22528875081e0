"""Which Caesura this is: the version, and the commit when it runs from a checkout."""

from __future__ import annotations

import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path


@cache
def version() -> str:
    """As `0.1.0`, or `0.1.0 (commit 1a2b3c4)` in a checkout: what wrote a log, for whoever reads it later."""
    try:
        number = installed_version("caesura-rl")
    except PackageNotFoundError:
        number = "not installed"
    return f"{number} (commit {commit})" if (commit := _commit()) else number


def _commit() -> str | None:
    """The short commit of the checkout that this code lies in, with `+` if it has changes; None outside of one."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        described = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty=+", "--exclude=*"], capture_output=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.decode().strip()
