"""What each verb does once its arguments are parsed: load, run, judge, report. Each returns an exit code."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml
from pydantic import ValidationError

from harness.backends import Backend, BackendError, CannotRun, EngineInfo, LiveBackend, is_live, make_backend, make_live_backend
from harness.checkpoints import ensure, find
from harness.errors import INTERRUPTED, BadInput
from harness.events import Delivered, Entry, Heard, Launched, Opened, Reference, comparable
from harness.execute import Listener
from harness.invariants import INVARIANTS, Judge
from harness.invariants.file import judge_file
from harness.junit import TestCase, write_junit
from harness.log import log_files, read_log
from harness.operations import SwapWeights, UpdateWeights
from harness.replay import BLOCKS_SEEN
from harness.runs import COVERAGE, REPORT, SCENARIO, RunFolder
from harness.scenario import EngineShape, Scenario, dump, load_scenario
from harness.scenario_source import suggestion
from harness.simulation.figures import figures_of
from harness.tokenizer import Tokenizer, tokenizer_of
from harness.trial import EXIT_CODES, Driver, Status, Trial, check_possible, review, run_live_trial, run_trial, worst
from reports.text import MARGIN, Origin, coverage_table, render, render_quick, render_state, summary_row


class Asked(NamedTuple):
    """What the verbs that run scenarios have in common."""

    overrides: Sequence[str]
    runs: Path
    seed: int
    as_json: bool
    min_pass_rate: float


def run(files: Sequence[Path], asked: Asked, *, engine: str, junit: Path | None = None) -> int:
    """Execute each file on one engine; the worst verdict decides."""
    scenarios = [_load(file, asked.overrides) for file in files]
    verb = ["run", "--engine", engine, *_rate(asked.min_pass_rate)]
    return _run_all(scenarios, engine, verb, asked, explain=False, junit=junit)


def diff(files: Sequence[Path], asked: Asked, *, engines: Sequence[str]) -> int:
    """Execute each file on the engine that is not `sim`, with the model following every operation and step."""
    if len(engines) != 2 or engines.count("sim") != 1:
        raise BadInput(f"--engines {','.join(engines)}: expected two engines of which one is sim (the model), as in sim,torch")
    scenarios = [_load(file, asked.overrides) for file in files]
    engine = engines[1] if engines[0] == "sim" else engines[0]
    verb = ["diff", "--engines", ",".join(engines), *_rate(asked.min_pass_rate)]
    return _run_all(scenarios, engine, verb, asked, explain=True)


def diff_logs(first: Path, second: Path, *, as_json: bool) -> int:
    """Compare two logs event by event, leaving out what says something about one engine alone, the checks of its numbers included."""
    logs = [read_log(first), read_log(second)]
    told = [[entry for entry in log.entries if not isinstance(entry.event, Reference)] for log in logs]
    pairs = zip(*([entry for entry in entries if not isinstance(entry.event, Opened)] for entries in told), strict=False)
    parted = next(((a, b) for a, b in pairs if comparable(a.event) != comparable(b.event)), None)
    lengths = list(map(len, told))
    status: Status = "holds" if parted is None and lengths[0] == lengths[1] else "violated"
    if as_json:
        _print_json({"status": status, "events": lengths, "first_difference": [entry.seq for entry in parted] if parted else None})
    elif parted is not None:
        print(f"violated: the logs part at event {parted[0].seq}\n  {first}: {parted[0].event}\n  {second}: {parted[1].event}")
    elif lengths[0] != lengths[1]:
        print(f"violated: {first} has {lengths[0]} events, {second} has {lengths[1]}; the shorter one is the other's beginning")
    else:
        print(f"holds: {lengths[0]} events are equal")
    return EXIT_CODES[status]


def replay(path: Path, *, until: int | None, show_state: bool, as_json: bool, min_pass_rate: float = 1.0) -> int:
    """Rebuild the state at an event, judge every invariant up to it, and have the model explain the log."""
    log = read_log(path)
    if until is not None:
        if until >= len(log.entries):
            raise BadInput(f"--until {until}: the log has events 0 to {len(log.entries) - 1}")
        log = replace(log, entries=log.entries[: until + 1])
    trial = review(log, _scenario_of(path), whole=until is None, min_pass_rate=min_pass_rate)
    state = trial.replay.state()
    if as_json:
        _print_json({**_answer(trial, path), **({"state": msgspec.to_builtins(state)} if show_state else {})})
    else:
        again = _again("replay", path, *(["--until", until] if until is not None else []), *_rate(min_pass_rate))
        print(render(trial, _tokenizer(trial.opened), Origin(path, again)), end="")
        if show_state:
            print(render_state(state, log.entries[-1].seq), end="")
    return EXIT_CODES[trial.verdict.status]


def quick_replay(path: Path, *, as_json: bool, min_pass_rate: float = 1.0) -> int:
    """Judge every invariant on one rank's file, without keeping its events, and without the model."""
    files = log_files(path)
    if len(files) > 1:
        raise BadInput(f"{path} has {len(files)} files: expected one rank's with --quick, as in {files[-1]}")
    judge = Judge()
    with _reading(files[0]) as progress:
        judge_file(files[0], judge, progress=progress)
    replay, judgements = judge.replay, [judgement.tolerating(min_pass_rate) for judgement in judge.finish()]
    found = {judgement.status for judgement in judgements}
    status: Status = "violated" if "violated" in found else "holds" if "holds" in found and replay.closed is not None else "unknown"
    if as_json:
        _print_json({"status": status, "log": str(path), "events": replay.seq + 1, "judgements": msgspec.to_builtins(judgements)})
    else:
        print(render_quick(replay, judgements, status, Origin(path, _again("replay", "--quick", path, *_rate(min_pass_rate)))), end="")
    return EXIT_CODES[status]


@contextmanager
def _reading(file: Path) -> Iterator[Callable[[int], object]]:
    """A bar on a terminal's stderr that grows with the bytes that were read."""
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(f"judging {file}", total=file.stat().st_size)
        yield lambda length: progress.advance(task, length)


def explore(shape: str, ranks: int, *, faults: Sequence[str], max_states: int | None, as_json: bool) -> int:
    """Try every order of events of a shape. Exit code 2 if the bound was reached before all was seen."""
    from harness.ranks import shapes

    found = shapes.explore(shape, ranks, faults=faults, max_states=max_states or shapes.MAX_STATES)
    status: Status = "violated" if found.violation else "holds" if found.exhaustive else "unknown"
    if as_json:
        violation = found.violation._asdict() if found.violation else None
        _print_json({"status": status, "shape": shape, "ranks": ranks, "faults": faults, **found._asdict(), "violation": violation})
        return EXIT_CODES[status]
    planted = f", planted {', '.join(faults)}" if faults else ""
    print(f"{shape} on {ranks} ranks{planted}: {shapes.SHAPES[shape].about}")
    print(f"{found.states:,} states, {found.moves:,} moves, depth {found.depth}, {'all of them' if found.exhaustive else 'not exhaustive'}")
    if found.violation:
        print(f"violated: {found.violation.invariant}: {found.violation.sentence}")
        for number, step in enumerate(found.violation.steps, 1):
            print(f"{number:>4}  {step}")
    else:
        print(
            "holds: no order of events breaks a promise" if found.exhaustive else "unknown: more states than --max-states; none seen is bad"
        )
    return EXIT_CODES[status]


def export(file: Path, *, to: str, profile: str) -> int:
    """Print the scenario as a script for one engine."""
    from harness.export import script

    print(script(load_scenario(file), to=to, profile=profile), end="")
    return 0


def serve(checkpoint: str, shape: dict[str, Any], server: dict[str, Any], *, in_process: bool, log: Path | None) -> int:
    """Serve the engine of this repository until it is told to stop; `shape` and `server` are fields of its configurations.

    Args:
        log: run folder of the engine's own log; None: it is not recorded.
    """
    try:
        from engine import EngineConfig, EngineDeadError
        from engine.server import ServerConfig
        from engine.server import serve as serve_engine
        from harness.backends.torch_live import TorchLive
    except ModuleNotFoundError as error:
        raise BadInput(f"serving needs {error.name}, which is not installed: pip install 'caesura-rl[engine,server]'") from None
    name = server["served_model_name"] or Path(checkpoint).name
    try:
        config = ServerConfig(**{**server, "served_model_name": name})
        engine = EngineConfig(checkpoint=ensure(checkpoint), **shape)
        recorder = None if log is None else TorchLive(in_process=in_process).recorder(EngineShape(checkpoint=checkpoint, **shape), log)
        serve_engine(engine, config, in_process=in_process, observer=recorder)
    except (ValueError, OSError, EngineDeadError) as error:
        raise BadInput(str(error)) from error
    except KeyboardInterrupt:
        return INTERRUPTED
    return 0


def report(folder: Path) -> int:
    """Judge a run folder again and write its report again."""
    if not folder.is_dir():
        raise BadInput(f"{folder} is no run folder: expected a folder with events.*.jsonl, as `caesura run` leaves in runs/")
    trial = review(read_log(folder), _scenario_of(folder))
    text = render(trial, _tokenizer(trial.opened), Origin(folder, _again("replay", folder)))
    run = RunFolder(folder)
    run.write(REPORT, text)
    run.write(COVERAGE, coverage_table(trial.coverage))
    print(text, end="")
    return EXIT_CODES[trial.verdict.status]


def _run_all(
    scenarios: Sequence[Scenario],
    engine: str,
    verb: Sequence[str],
    asked: Asked,
    *,
    explain: bool,
    junit: Path | None = None,
) -> int:
    """Run scenarios one after the other on fresh engines; a single one is reported whole, several a line each."""
    for scenario in scenarios:
        if scenario.workload is not None and (engine != "sim" or explain):
            raise BadInput(f"{scenario.path}: its workload is simulated in virtual time; expected `run --engine sim`, got {' '.join(verb)}")
    statuses: list[Status] = []
    tests: list[TestCase] = []
    for scenario, run_one in _each(scenarios, engine, asked, explain=explain):
        try:
            trial, folder = run_one()
        except CannotRun as refusal:
            statuses.append("unknown")
            _print_refusal(scenario, refusal, as_json=asked.as_json)
            continue
        text = render(trial, _tokenizer(trial.opened), Origin(folder.path, _again_asked(scenario, verb, asked)))
        folder.write(REPORT, text)
        folder.write(COVERAGE, coverage_table(trial.coverage))
        folder.publish()
        statuses.append(trial.verdict.status)
        if junit is not None:
            tests.append(_test_case(trial))
            write_junit(junit, f"caesura {verb[0]} {engine}", tests)
        if asked.as_json:
            _print_json(_answer(trial, folder.path))
        elif len(scenarios) == 1 or trial.verdict.status != "holds":
            print(text, end="")
        else:
            print(summary_row(trial, folder.path), flush=True)
        if trial.interrupted:
            return INTERRUPTED
    return EXIT_CODES[worst(statuses)]


Run = Callable[[], tuple[Trial, RunFolder]]


def _each(scenarios: Sequence[Scenario], engine: str, asked: Asked, *, explain: bool) -> Iterator[tuple[Scenario, Run]]:
    """Each scenario, and what runs it. A live engine may go on from one scenario to the next, and is stopped after the last."""
    if not is_live(engine):
        for scenario in scenarios:
            yield scenario, partial(_run_one, scenario, engine, asked, explain=explain)
        return
    backend = make_live_backend(engine)
    if explain and backend.level < BLOCKS_SEEN:
        raise BadInput(f"diff has the model explain an engine, and {engine} shows level {backend.level}, not its blocks; expected `run`")
    with asyncio.Runner() as runner:
        try:
            for scenario in scenarios:
                yield scenario, lambda scenario=scenario: runner.run(_run_live(scenario, backend, asked))
        finally:
            runner.run(backend.stop())


def _run_one(scenario: Scenario, engine: str, asked: Asked, *, explain: bool) -> tuple[Trial, RunFolder]:
    """Start an engine, run the scenario on it in a new run folder, stop the engine."""
    backend = make_backend(engine, seed=asked.seed)
    if engine != "sim":
        _make_sources(scenario)
    with _progress(scenario, engine) as progress, _started(backend, scenario.engine) as info:
        check_possible(scenario, backend, info)
        folder = _new_folder(scenario, asked)
        trial = run_trial(
            scenario,
            backend,
            info,
            folder.path,
            seed=asked.seed,
            explain=explain,
            min_pass_rate=asked.min_pass_rate,
            progress=progress,
            drive=_driver(scenario, asked.seed),
        )
    return trial, folder


ATTEMPTS = 5
"""How often a scenario is run on a live engine whose blocks are seen, until it has met the moments that it is about."""


async def _run_live(scenario: Scenario, backend: LiveBackend, asked: Asked) -> tuple[Trial, RunFolder]:
    """Run the scenario on a live engine, and again if all was well but its steps and our calls did not meet as the scenario wants."""
    _make_sources(scenario)
    attempts = ATTEMPTS if backend.level >= BLOCKS_SEEN else 1
    for attempt in range(1, attempts + 1):
        trial, folder = await _run_live_once(scenario, backend, asked)
        if attempt == attempts or not trial.verdict.missed_its_point:
            break
        missed = "; ".join(trial.verdict.missed)
        print(f"{scenario.path or scenario.name}: {missed}; run again, attempt {attempt + 1} of {attempts}", file=sys.stderr)
        folder.remove()
    return msgspec.structs.replace(trial, attempts=attempt), folder


async def _run_live_once(scenario: Scenario, backend: LiveBackend, asked: Asked) -> tuple[Trial, RunFolder]:
    """One run in a new run folder, where the engine keeps its own log from its start on."""
    folder = _new_folder(scenario, asked)
    with _progress(scenario, backend.name) as progress:
        try:
            trial = await run_live_trial(
                scenario, backend, folder.path, seed=asked.seed, min_pass_rate=asked.min_pass_rate, progress=progress
            )
        except BackendError:
            folder.remove()
            raise
    return trial, folder


def _new_folder(scenario: Scenario, asked: Asked) -> RunFolder:
    folder = RunFolder.make(asked.runs, scenario.name)
    folder.write(SCENARIO, dump(scenario) if asked.overrides else scenario.text)
    return folder


def _print_refusal(scenario: Scenario, refusal: CannotRun, *, as_json: bool) -> None:
    if as_json:
        _print_json({"status": "unknown", "reasons": [str(refusal)], "scenario": str(scenario.path)})
    else:
        print(f"{'unknown':<{MARGIN}}{refusal}", flush=True)


def _again_asked(scenario: Scenario, verb: Sequence[str], asked: Asked) -> str:
    sets = [word for override in asked.overrides for word in ("--set", override)]
    return _again(verb[0], scenario.path, *verb[1:], *sets, *(["--seed", str(asked.seed)] if asked.seed else []))


def _driver(scenario: Scenario, seed: int) -> Callable[[Sequence[Listener]], Driver] | None:
    """What carries out a scenario with a workload; None: lockstep does."""
    if scenario.workload is None:
        return None
    from harness.simulation.simulation import Simulation

    return lambda listeners: Simulation(scenario, listeners, seed=seed)


@contextmanager
def _started(backend: Backend, shape: EngineShape) -> Iterator[EngineInfo]:
    try:
        yield backend.start(shape)
    finally:
        backend.stop()


def _make_sources(scenario: Scenario) -> None:
    """Checkpoints that weights come from: made or found before the run, so that a missing one is no answer of the engine's."""
    for entry in scenario.timeline:
        if isinstance(entry.operation, UpdateWeights | SwapWeights) and entry.operation.source.checkpoint is not None:
            ensure(entry.operation.source.checkpoint)


def _test_case(trial: Trial) -> TestCase:
    """A run as a line of CI's list: violated fails, unknown counts as skipped."""
    scenario = trial.scenario
    name = str(scenario.path or scenario.name) if scenario is not None else "log"
    if trial.verdict.status == "holds":
        return TestCase(name=name)
    return TestCase(
        name=name, failure="\n".join(trial.verdict.reasons), kind="failure" if trial.verdict.status == "violated" else "skipped"
    )


def _load(file: Path, overrides: Sequence[str]) -> Scenario:
    scenario = load_scenario(file)
    for name in scenario.expect.violates:
        if name not in INVARIANTS:
            raise BadInput(f"{file}: expect.violates: got {name!r}{suggestion(name, INVARIANTS)}; expected one of {', '.join(INVARIANTS)}")
    if not overrides:
        return scenario
    fields = scenario.engine.model_dump(mode="json")
    for override in overrides:
        name, equals, value = override.partition("=")
        field = name.removeprefix("engine.")
        if not equals or field == name or field not in fields:
            raise BadInput(f"--set {override}: expected engine.NAME=VALUE with NAME one of {', '.join(fields)}")
        fields[field] = _yaml_value(override, value)
    try:
        return replace(scenario, engine=EngineShape.model_validate(fields))
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInput(f"--set {' --set '.join(overrides)}: {'.'.join(map(str, first['loc']))} {first['msg']}") from None


def _yaml_value(override: str, value: str) -> Any:
    try:
        return yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise BadInput(f"--set {override}: {value!r} is no YAML value") from error


def _scenario_of(path: Path) -> Scenario | None:
    """The scenario that a run folder keeps beside its log."""
    file = (path if path.is_dir() else path.parent) / SCENARIO
    return load_scenario(file) if file.is_file() else None


def _tokenizer(opened: Opened) -> Tokenizer | None:
    """What turns this log's tokens into text: symbolic tokens are none, and the checkpoint may be on another machine."""
    folder = find(opened.engine["checkpoint"]) if opened.backend != "sim" else None
    return None if folder is None else tokenizer_of(folder)


def _rate(min_pass_rate: float) -> list[str]:
    """The option, where it is not the default."""
    return [] if min_pass_rate == 1 else ["--min-pass-rate", f"{min_pass_rate:g}"]


def _again(*words: object) -> str:
    """The command that shows the same once more: of `caesura`, or the program that calls it, which may have changed the engine."""
    if (program := Path(sys.argv[0])).name == "caesura" or program.stem == "cli":
        return shlex.join(["caesura", *(str(word) for word in words if word is not None)])
    return shlex.join(["python", *sys.argv])


def _answer(trial: Trial, folder: Path) -> dict[str, Any]:
    """A verdict for machines."""
    verdict = trial.verdict
    return {
        "status": verdict.status,
        "reasons": verdict.reasons,
        "scenario": str(trial.scenario.path) if trial.scenario and trial.scenario.path else None,
        "engine": trial.opened.backend,
        "level": trial.opened.level,
        "folder": str(folder),
        "events": len(trial.entries),
        "judgements": msgspec.to_builtins(verdict.judgements),
        "situations": {name: sighting._asdict() for name, sighting in trial.coverage.items()},
        "explanation": msgspec.to_builtins(verdict.explanation),
        "attempts": trial.attempts,
        "figures": _figures(trial),
    }


def _figures(trial: Trial) -> dict[str, Any] | None:
    """How a simulated workload fared; None for a timeline in lockstep."""
    workload = trial.scenario.workload if trial.scenario is not None else None
    return None if workload is None else asdict(figures_of(trial.entries, workload))


def _print_json(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


@contextmanager
def _progress(scenario: Scenario, engine: str) -> Iterator[Listener]:
    """A line on stderr that counts steps and tokens while an engine runs; a plain line where there is no terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    label = f"{scenario.path or scenario.name} on {engine}"
    if not console.is_terminal:
        console.print(f"running {label} ...", highlight=False)
        yield lambda entries: None
        return
    with console.status(f"{label}: starting") as status:
        steps = tokens = 0

        def hear(entries: Sequence[Entry]) -> None:
            nonlocal steps, tokens
            for entry in entries:
                if isinstance(entry.event, Launched):
                    steps += 1
                elif isinstance(entry.event, Delivered | Heard):
                    tokens += sum(len(output.tokens) for output in entry.event.outputs)
            status.update(f"{label}: {steps} steps, {tokens} tokens")

        yield hear
