"""The verbs of `caesura`. Each is a thin layer: parse, call, print, exit code.

Exit codes: 0 holds, 1 violated, 2 unknown, 64 usage error, 130 interrupted.
Libraries of engines are imported only by the verb that needs them.
"""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from typer.exceptions import TyperException

from harness.errors import INTERRUPTED, USAGE, BadInput

app = typer.Typer(
    help="Prove that an LLM inference engine may be paused mid-tokens, given new weights, and resumed.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ScenarioFiles = Annotated[list[Path], typer.Argument(metavar="FILE...", help="Scenario files.", show_default=False)]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="engine.NAME=VALUE", help="Override a field of the scenario's engine.")
]
Runs = Annotated[Path, typer.Option(help="Where run folders are made.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of all that `sim` draws: symbolic tokens, and what a workload leaves to chance.")]
MinPassRate = Annotated[
    float,
    typer.Option(
        min=0, max=1, metavar="SHARE", help="Golden checks that must pass; below 1 only where bits depend on the batch (docs/numerics.md)."
    ),
]
Junit = Annotated[Path | None, typer.Option(metavar="FILE", help="Write JUnit XML, too.")]
Json = Annotated[bool, typer.Option("--json", help="Print the answer for machines.")]


class Family(StrEnum):
    qwen3 = "qwen3"
    llama = "llama"


class DType(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


@app.command()
def run(
    files: ScenarioFiles,
    engine: Annotated[str, typer.Option(help="sim or torch.")] = "sim",
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    seed: Seed = 0,
    min_pass_rate: MinPassRate = 1.0,
    junit: Junit = None,
    as_json: Json = False,
) -> None:
    """Execute scenario files on one engine, check every invariant, report."""
    from harness import verbs

    _exit(verbs.run(files, verbs.Asked(overrides or (), runs, seed, as_json, min_pass_rate), engine=engine, junit=junit))


@app.command()
def diff(
    files: Annotated[list[Path], typer.Argument(metavar="FILE... | LOG LOG", help="Scenario files, or two logs.", show_default=False)],
    engines: Annotated[str | None, typer.Option(help="Two engines, one of them sim: sim,torch.")] = None,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    seed: Seed = 0,
    min_pass_rate: MinPassRate = 1.0,
    as_json: Json = False,
) -> None:
    """Same operations on two engines, the whole visible state compared after each; or two logs, event by event."""
    from harness import verbs

    if engines is not None:
        _exit(verbs.diff(files, verbs.Asked(overrides or (), runs, seed, as_json, min_pass_rate), engines=engines.split(",")))
    if len(files) != 2:
        raise BadInput(f"without --engines, diff compares two logs; got {len(files)} path(s)")
    _exit(verbs.diff_logs(*files, as_json=as_json))


@app.command()
def replay(
    log: Annotated[Path, typer.Argument(help="A run folder or one events.*.jsonl file.", show_default=False)],
    until: Annotated[int | None, typer.Option(min=0, metavar="SEQ", help="Stop after this event number.")] = None,
    state: Annotated[bool, typer.Option("--state", help="Print the visible state there.")] = False,
    min_pass_rate: MinPassRate = 1.0,
    as_json: Json = False,
) -> None:
    """Rebuild an engine's state from its log; judge every invariant; have the model explain it."""
    from harness import verbs

    _exit(verbs.replay(log, until=until, show_state=state, as_json=as_json, min_pass_rate=min_pass_rate))


@app.command()
def fuzz(
    engine: Annotated[str, typer.Option(help="sim, torch, or FILE.py:CLASS of your own.")] = "sim",
    time: Annotated[str | None, typer.Option(metavar="60s", help="Stop after this time; 60s unless --cases is given.")] = None,
    cases: Annotated[int | None, typer.Option(min=1, help="Stop after so many cases.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first case; each case has the next.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    corpus: Annotated[Path | None, typer.Option(help="File of known failures: read, and added to.")] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN", help="Go on with the campaign of a run folder.")] = None,
    junit: Junit = None,
    as_json: Json = False,
) -> None:
    """Put an engine to random interleavings; shrink each failure to a scenario file that reproduces it."""
    from harness.fuzz import command

    _exit(
        command.fuzz(
            command.Asked(
                engine=engine,
                time=time,
                cases=cases,
                seed=seed,
                jobs=jobs,
                overrides=overrides or (),
                runs=runs,
                corpus=corpus,
                resume=resume,
                junit=junit,
                as_json=as_json,
            )
        )
    )


@app.command()
def explore(
    shape: Annotated[str, typer.Argument(help="What the callers do, as pause-resume-wave.", show_default=False)],
    ranks: Annotated[int, typer.Option(help="Data-parallel ranks, 2 to 4.")] = 2,
    faults: Annotated[list[str] | None, typer.Option("--fault", help="Plant a fault, as K36; may be repeated.")] = None,
    max_states: Annotated[int | None, typer.Option(min=1, help="Give up beyond so many states.")] = None,
    as_json: Json = False,
) -> None:
    """Try every interleaving of a small data-parallel control plane; show the shortest bad one."""
    from harness import verbs

    _exit(verbs.explore(shape, ranks, faults=faults or (), max_states=max_states, as_json=as_json))


@app.command()
def export(
    file: Annotated[Path, typer.Argument(help="A scenario file.", show_default=False)],
    to: Annotated[str, typer.Option("--to", help="Engine of the script: vllm.")] = "vllm",
    profile: Annotated[str, typer.Option(help="What the engine is taken to do, as in vllm-0.31.")] = "vllm-0.32",
) -> None:
    """Print a script that shows a broken promise on a real engine, without Caesura; it exits 1 while it is broken."""
    from harness import verbs

    _exit(verbs.export(file, to=to, profile=profile))


@app.command()
def report(folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]) -> None:
    """Judge a run again and render its report again."""
    from harness import verbs

    _exit(verbs.report(folder))


@app.command()
def drill(
    faults: Annotated[list[str] | None, typer.Argument(metavar="[FAULT...]", help="As K31; none: all.", show_default=False)] = None,
    third: Annotated[int | None, typer.Option(min=1, max=3, help="Only every third fault, from this one on.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Hunts for each fault.")] = 5,
    minimal: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write the smallest case of each fault there.")] = None,
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the page that lists the faults and what was measured.")] = None,
    as_json: Json = False,
) -> None:
    """Plant every fault that is known, and see whether the invariant that it names catches it."""
    from harness.faults import command

    _exit(command.run(faults or (), third=third, seeds=seeds, minimal=minimal, page_file=page, as_json=as_json))


@app.command()
def checkpoint(
    name: Annotated[str, typer.Argument(help="tiny, smollm2 or tracer.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="Folder to make; it must not exist.", show_default=False)],
    family: Annotated[Family, typer.Option(help="Architecture of `tiny` and `tracer`.")] = Family.qwen3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of `tiny`'s random weights.")] = 0,
    versions: Annotated[int, typer.Option(min=1, help="Versions of `tracer`, each a folder v1, v2, ... in OUT.")] = 8,
    dtype: Annotated[DType, typer.Option(help="In which `tracer` is to be served.")] = DType.float32,
) -> None:
    """Make a checkpoint without a hub."""
    from harness.checkpoints import make_smollm2, make_tiny

    if out.exists():
        raise BadInput(f"{out} exists already: name a folder that does not, or remove it")
    if name == "tiny":
        make_tiny(out, family=family.value, seed=seed)
    elif name == "smollm2":
        make_smollm2(out)
    elif name == "tracer":
        from harness.tracer import make_tracer

        make_tracer(out, family=family.value, dtype=dtype.value, versions=versions)
    else:
        raise BadInput(f"unknown checkpoint {name!r}: expected tiny, smollm2 or tracer")
    typer.echo(f"made {out}")


def _exit(code: int) -> NoReturn:
    raise typer.Exit(code)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: every refusal is one sentence on stderr and exit code 64; Ctrl-C is 130."""
    sys.exit(_run(arguments))


def _run(arguments: list[str] | None) -> int:
    try:
        return app(arguments, standalone_mode=False) or 0
    except (typer.Abort, KeyboardInterrupt):
        typer.echo("interrupted: what was recorded is kept", err=True)
        return INTERRUPTED
    except TyperException as error:
        if message := error.format_message():
            typer.echo(f"caesura: {message}", err=True)
        return USAGE
    except BadInput as error:
        typer.echo(f"caesura: {error}", err=True)
        return USAGE


if __name__ == "__main__":
    main()
