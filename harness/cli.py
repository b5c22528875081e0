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

from harness.errors import BadInput

USAGE, INTERRUPTED = 64, 130

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
Seed = Annotated[int, typer.Option(min=0, help="Seed of the symbolic tokens of `sim`.")]
Json = Annotated[bool, typer.Option("--json", help="Print the answer for machines.")]


class TinyFamily(StrEnum):
    qwen3 = "qwen3"
    llama = "llama"


@app.command()
def run(
    files: ScenarioFiles,
    engine: Annotated[str, typer.Option(help="sim or torch.")] = "sim",
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Execute scenario files on one engine, check every invariant, report."""
    from harness import verbs

    _exit(verbs.run(files, engine=engine, overrides=overrides or (), runs=runs, seed=seed, as_json=as_json))


@app.command()
def diff(
    files: Annotated[list[Path], typer.Argument(metavar="FILE... | LOG LOG", help="Scenario files, or two logs.", show_default=False)],
    engines: Annotated[str | None, typer.Option(help="Two engines, one of them sim: sim,torch.")] = None,
    overrides: Overrides = None,
    runs: Runs = Path("runs"),
    seed: Seed = 0,
    as_json: Json = False,
) -> None:
    """Same operations on two engines, the whole visible state compared after each; or two logs, event by event."""
    from harness import verbs

    if engines is not None:
        _exit(verbs.diff(files, engines=engines.split(","), overrides=overrides or (), runs=runs, seed=seed, as_json=as_json))
    if len(files) != 2:
        raise BadInput(f"without --engines, diff compares two logs; got {len(files)} path(s)")
    _exit(verbs.diff_logs(*files, as_json=as_json))


@app.command()
def replay(
    log: Annotated[Path, typer.Argument(help="A run folder or one events.*.jsonl file.", show_default=False)],
    until: Annotated[int | None, typer.Option(min=0, metavar="SEQ", help="Stop after this event number.")] = None,
    state: Annotated[bool, typer.Option("--state", help="Print the visible state there.")] = False,
    as_json: Json = False,
) -> None:
    """Rebuild an engine's state from its log; judge every invariant; have the model explain it."""
    from harness import verbs

    _exit(verbs.replay(log, until=until, show_state=state, as_json=as_json))


@app.command()
def report(folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.", show_default=False)]) -> None:
    """Judge a run again and render its report again."""
    from harness import verbs

    _exit(verbs.report(folder))


@app.command()
def checkpoint(
    name: Annotated[str, typer.Argument(help="tiny or smollm2.", show_default=False)],
    out: Annotated[Path, typer.Argument(help="Folder to make; it must not exist.", show_default=False)],
    family: Annotated[TinyFamily, typer.Option(help="Architecture of `tiny`.")] = TinyFamily.qwen3,
    seed: Annotated[int, typer.Option(min=0, help="Seed of `tiny`'s random weights.")] = 0,
) -> None:
    """Make a checkpoint without a hub."""
    from harness.checkpoints import make_smollm2, make_tiny

    if name == "tiny":
        make_tiny(out, family=family.value, seed=seed)
    elif name == "smollm2":
        make_smollm2(out)
    else:
        raise BadInput(f"unknown checkpoint {name!r}: expected tiny or smollm2")
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
        typer.echo(f"caesura: {error.format_message()}", err=True)
        return USAGE
    except BadInput as error:
        typer.echo(f"caesura: {error}", err=True)
        return USAGE


if __name__ == "__main__":
    main()
