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


class LateRequests(StrEnum):
    queue = "queue"
    reject = "reject"
    block = "block"


class DType(StrEnum):
    float32 = "float32"
    bfloat16 = "bfloat16"


@app.command()
def run(
    files: ScenarioFiles,
    engine: Annotated[str, typer.Option(help="sim, torch or vllm in lockstep; torch-live or vllm-live running by themselves.")] = "sim",
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
    quick: Annotated[bool, typer.Option("--quick", help="For logs larger than memory: invariants alone, of one rank's file.")] = False,
    min_pass_rate: MinPassRate = 1.0,
    as_json: Json = False,
) -> None:
    """Rebuild an engine's state from its log; judge every invariant; have the model explain it."""
    from harness import verbs

    if quick and (state or until is not None):
        raise BadInput("--quick keeps no events: expected it without --until and --state")
    if quick:
        _exit(verbs.quick_replay(log, as_json=as_json, min_pass_rate=min_pass_rate))
    _exit(verbs.replay(log, until=until, show_state=state, as_json=as_json, min_pass_rate=min_pass_rate))


@app.command()
def fuzz(
    engine: Annotated[str, typer.Option(help="sim, torch, vllm-scheduler, vllm, or FILE.py:CLASS of your own.")] = "sim",
    time: Annotated[str | None, typer.Option(metavar="60s", help="Stop after this time; 60s unless --cases is given.")] = None,
    cases: Annotated[int | None, typer.Option(min=1, help="Stop after so many cases.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first case; each case has the next.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS", help="On the Ray cluster there; `auto`: the one of this machine.")] = None,
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
                ray=ray,
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
def check(
    url: Annotated[str, typer.Argument(metavar="URL", help="Of a running server, as http://127.0.0.1:8000.", show_default=False)],
    key: Annotated[str | None, typer.Option(envvar="CAESURA_API_KEY", help="What the server wants as bearer.")] = None,
    tracer: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The tracer that it serves a version of: other versions are pushed from there.")
    ] = None,
    require: Annotated[list[str] | None, typer.Option(metavar="CHECK", help="Unknown if this one cannot be made; may be repeated.")] = None,
    only: Annotated[list[str] | None, typer.Option(metavar="CHECK", help="Make this one alone; may be repeated.")] = None,
    foreign_traffic_ok: Annotated[
        bool, typer.Option("--foreign-traffic-ok", help="Go on though others use the server, and may lose requests.")
    ] = False,
    timeout: Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="How long an answer may take.")] = 10.0,
    runs: Runs = Path("runs"),
    as_json: Json = False,
) -> None:
    """Put a running server to every promise, over HTTP alone; it is left as it was found."""
    try:
        from harness.check import command
    except ModuleNotFoundError as error:
        raise BadInput(f"`check` needs the package {error.name}: install caesura-rl with the extra 'check'") from error

    asked = command.Asked(key, timeout, tracer, foreign_traffic_ok, require or (), only or (), runs, as_json)
    _exit(command.check(url, asked))


@app.command()
def serve(
    checkpoint: Annotated[str, typer.Argument(help="tiny, smollm2, or a folder; of a tracer that of a version.", show_default=False)],
    host: Annotated[str, typer.Option(help="Address to listen at; beyond this machine, dev mode wants an API key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 8000,
    dev_mode: Annotated[
        bool,
        typer.Option(
            "--dev-mode",
            envvar=["CAESURA_SERVER_DEV_MODE", "VLLM_SERVER_DEV_MODE"],
            help="Serve the control plane: pause, resume, abort, weights, sleep.",
        ),
    ] = False,
    api_key: Annotated[
        str | None, typer.Option(envvar=["CAESURA_API_KEY", "VLLM_API_KEY"], help="What clients must send as bearer.")
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="What /v1/models lists; the checkpoint's name.")] = None,
    drain: Annotated[float, typer.Option(min=0, metavar="SECONDS", help="How long a stop lets requests run on.")] = 5.0,
    log: Annotated[Path | None, typer.Option(metavar="DIR", help="Record what the engine does, for `caesura replay DIR`.")] = None,
    block_size: Annotated[int, typer.Option(min=1, help="Tokens of a KV block.")] = 16,
    num_blocks: Annotated[int, typer.Option(min=1, help="KV blocks.")] = 512,
    max_model_len: Annotated[int, typer.Option(min=2, help="Longest sequence, prompt and output.")] = 2048,
    max_num_seqs: Annotated[int, typer.Option(min=1, help="Most requests running at a time.")] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="Token budget of a step.")] = 512,
    prefix_caching: Annotated[bool, typer.Option(help="Share KV between equal prefixes.")] = True,
    async_scheduling: Annotated[bool, typer.Option(help="Schedule a step while the one before is in flight.")] = False,
    host_blocks: Annotated[int, typer.Option(min=0, help="KV blocks of a tier in host memory.")] = 0,
    late_requests: Annotated[LateRequests, typer.Option(help="What becomes of requests that come while paused.")] = LateRequests.queue,
    dtype: Annotated[DType, typer.Option(help="In which the model computes.")] = DType.float32,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    in_process: Annotated[bool, typer.Option("--in-process", help="The engine in a thread of the server, not in its own process.")] = False,
) -> None:
    """Our engine behind an HTTP API: OpenAI's completions, and the control plane of RL servers."""
    from harness import verbs

    server = {
        "host": host,
        "port": port,
        "dev_mode": dev_mode,
        "api_key": api_key,
        "served_model_name": served_model_name,
        "drain_s": drain,
    }
    shape = {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "prefix_caching": prefix_caching,
        "async_scheduling": async_scheduling,
        "host_blocks": host_blocks,
        "late_requests": late_requests.value,
        "dtype": dtype.value,
        "device": device,
    }
    _exit(verbs.serve(checkpoint, shape, server, in_process=in_process, log=log))


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
