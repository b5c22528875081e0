"""Which Caesura this is: the version, and the commit when it runs from a checkout."""

from __future__ import annotations

import subprocess
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path


def version() -> str:
    try:
        return installed_version("caesura-rl")
    except PackageNotFoundError:
        return "unknown (not installed)"


def commit() -> str | None:
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
