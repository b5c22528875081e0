"""README and docs say what is true: commands run and print what is shown, names exist, links lead somewhere."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.invariants import INVARIANTS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

# What a reader waits for, a test need not.
SHORTER = [(re.compile(r"(?<!latest )--time \S+|--cases \d{4,}"), "--cases 60")]

# What changes from run to run and from machine to machine.
CHANGING = [
    (re.compile(r"^caesura .*$", re.M), "caesura VERSION"),
    (re.compile(r"runs/\d{8}-\d{6}-"), "runs/TIME-"),
    (re.compile(r"(r\d=)\d+"), r"\1TOKEN"),
    (re.compile(r"\d+(?= from weights)|(?<=got {7})\d+(?=; of the)"), "TOKEN"),
    (re.compile(r"^(  (?:default|v2) \[\d+:\d+\] +)[\d ]+$", re.M), r"\1TOKENS"),
]


def consoles(page: Path) -> list[tuple[str, str]]:
    """(command, shown output) of every console block whose commands are the project's own."""
    blocks = re.findall(r"```console\n(.*?)```", page.read_text(encoding="utf-8"), re.S)
    commands = []
    for block in blocks:
        for part in re.split(r"^\$ ", block, flags=re.M)[1:]:
            line, _, output = part.partition("\n")
            commands.append((line.split("  #")[0].strip(), output.rstrip()))
    return commands


OURS = [
    (page.name, command, output)
    for page in PAGES
    for command, output in consoles(page)
    # What is said to a server or a cluster is tested with one: test_check_page.py, test_server_page.py, unit/fuzz/test_ray_team.py.
    if command.split()[0] in ("caesura", "python") and "http://" not in command and "--ray" not in command
]


def steady(text: str) -> str:
    for pattern, replacement in CHANGING:
        text = pattern.sub(replacement, text)
    return text.strip()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where commands run: the scenarios, examples and benchmarks of this checkout, and a runs folder of its own."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("scenarios", "examples", "benchmarks"):
        shutil.copytree(ROOT / name, folder / name)
    return folder


@pytest.mark.parametrize(("page", "command", "output"), OURS, ids=[f"{page}: {command}" for page, command, _ in OURS])
def test_a_command_runs_and_prints_what_is_shown(checkout: Path, page: str, command: str, output: str) -> None:
    if "vllm" in command and find_spec("vllm") is None:
        pytest.skip("vllm is not installed here; `nox -s vllm` installs it")
    for long, short in SHORTER:
        command = long.sub(short, command)
    program, *arguments = shlex.split(command)
    words = [sys.executable, *(["-m", "harness.cli"] if program == "caesura" else []), *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(words, cwd=checkout, env=environment, capture_output=True, text=True, timeout=300)
    finds = "violated" in output or "toy_engine" in command
    assert result.returncode == (1 if finds else 0), result.stdout + result.stderr
    if page == "README.md" and output:
        assert steady(result.stdout) == steady(output)
    else:  # elsewhere a page may show how the output begins
        assert steady(result.stdout).startswith(steady(output))


def test_the_invariants_are_those_of_the_registry() -> None:
    for name, invariant in INVARIANTS.items():
        assert f"- **{name}**: {invariant.statement()}\n" in README
    assert re.findall(r"^- \*\*([a-z-]+)\*\*: ", README, re.M) == list(INVARIANTS)


def test_the_nox_sessions_exist() -> None:
    noxfile = (ROOT / "noxfile.py").read_text(encoding="utf-8")
    sessions = re.findall(r"nox -s (\w+)", README)
    assert sessions
    assert not [name for name in sessions if f"\ndef {name}(session" not in noxfile]


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8"))
    assert not [link for link in links if not (page.parent / link).exists()]
