"""What each verb does once its arguments are parsed: load, run, judge, report. Each returns an exit code."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import yaml
from pydantic import ValidationError

from harness.backends import Backend, EngineInfo, make_backend
from harness.checkpoints import find
from harness.errors import BadInput
from harness.events import Delivered, Entry, Launched, Opened, comparable
from harness.execute import Listener
from harness.log import read_log
from harness.runs import REPORT, SCENARIO, RunFolder
from harness.scenario import EngineShape, Scenario, dump, load_scenario
from harness.tokenizer import Tokenizer, tokenizer_of
from harness.trial import EXIT_CODES, Status, Trial, review, run_trial, worst
from reports.text import Origin, render, render_state, summary_row


def run(files: Sequence[Path], *, engine: str, overrides: Sequence[str], runs: Path, seed: int, as_json: bool) -> int:
    """Execute each file on one engine; the worst verdict decides."""
    scenarios = [_load(file, overrides) for file in files]
    verb = ["run", "--engine", engine]
    return _run_all(scenarios, engine, verb, overrides=overrides, runs=runs, seed=seed, as_json=as_json, explain=False)


def diff(files: Sequence[Path], *, engines: Sequence[str], overrides: Sequence[str], runs: Path, seed: int, as_json: bool) -> int:
    """Execute each file on the engine that is not `sim`, with the model following every operation and step."""
    if len(engines) != 2 or "sim" not in engines:
        raise BadInput(f"--engines {','.join(engines)}: expected two engines of which one is sim (the model), as in sim,torch")
    scenarios = [_load(file, overrides) for file in files]
    engine = engines[1] if engines[0] == "sim" else engines[0]
    verb = ["diff", "--engines", ",".join(engines)]
    return _run_all(scenarios, engine, verb, overrides=overrides, runs=runs, seed=seed, as_json=as_json, explain=True)


def diff_logs(first: Path, second: Path, *, as_json: bool) -> int:
    """Compare two logs event by event, leaving out what says something about one engine alone."""
    logs = [read_log(first), read_log(second)]
    pairs = zip(*([e for e in log.entries if not isinstance(e.event, Opened)] for log in logs), strict=False)
    parted = next(((a, b) for a, b in pairs if comparable(a.event) != comparable(b.event)), None)
    lengths = [len(log.entries) for log in logs]
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


def replay(path: Path, *, until: int | None, show_state: bool, as_json: bool) -> int:
    """Rebuild the state at an event, judge every invariant up to it, and have the model explain the log."""
    log = read_log(path)
    if until is not None:
        if until >= len(log.entries):
            raise BadInput(f"--until {until}: the log has events 0 to {len(log.entries) - 1}")
        log = replace(log, entries=log.entries[: until + 1])
    trial = review(log, _scenario_of(path), whole=until is None)
    state = trial.replay.state()
    if as_json:
        _print_json({**_answer(trial, path), **({"state": msgspec.to_builtins(state)} if show_state else {})})
    else:
        again = _again("replay", path, *(["--until", until] if until is not None else []))
        print(render(trial, _tokenizer(trial.opened), Origin(path, again)), end="")
        if show_state:
            print(render_state(state, log.entries[-1].seq), end="")
    return EXIT_CODES[trial.verdict.status]


def report(folder: Path) -> int:
    """Judge a run folder again and write its report again."""
    if not folder.is_dir():
        raise BadInput(f"{folder} is no run folder: expected a folder with events.*.jsonl, as `caesura run` leaves in runs/")
    trial = review(read_log(folder), _scenario_of(folder))
    text = render(trial, _tokenizer(trial.opened), Origin(folder, _again("replay", folder)))
    RunFolder(folder).write(REPORT, text)
    print(text, end="")
    return EXIT_CODES[trial.verdict.status]


def _run_all(
    scenarios: Sequence[Scenario],
    engine: str,
    verb: Sequence[str],
    *,
    overrides: Sequence[str],
    runs: Path,
    seed: int,
    as_json: bool,
    explain: bool,
) -> int:
    """Run scenarios one after the other on fresh engines; a single one is reported whole, several a line each."""
    statuses: list[Status] = []
    for scenario in scenarios:
        with _progress(scenario, engine) as progress, _started(make_backend(engine, seed=seed), scenario.engine) as (backend, info):
            folder = RunFolder.make(runs, scenario.name)
            folder.write(SCENARIO, dump(scenario) if overrides else scenario.text)
            trial = run_trial(scenario, backend, info, folder.path, seed=seed, explain=explain, progress=progress)
        sets = [word for override in overrides for word in ("--set", override)]
        origin = Origin(folder.path, _again(verb[0], scenario.path, *verb[1:], *sets, *(["--seed", str(seed)] if seed else [])))
        text = render(trial, _tokenizer(trial.opened), origin)
        folder.write(REPORT, text)
        folder.publish()
        statuses.append(trial.verdict.status)
        if as_json:
            _print_json(_answer(trial, folder.path))
        elif len(scenarios) == 1 or trial.verdict.status != "holds":
            print(text, end="")
        else:
            print(summary_row(trial, folder.path), flush=True)
    return EXIT_CODES[worst(statuses)]


@contextmanager
def _started(backend: Backend, shape: EngineShape) -> Iterator[tuple[Backend, EngineInfo]]:
    try:
        yield backend, backend.start(shape)
    finally:
        backend.stop()


def _load(file: Path, overrides: Sequence[str]) -> Scenario:
    scenario = load_scenario(file)
    if not overrides:
        return scenario
    fields = scenario.engine.model_dump(mode="json")
    for override in overrides:
        name, equals, value = override.partition("=")
        field = name.removeprefix("engine.")
        if not equals or field == name or field not in fields:
            raise BadInput(f"--set {override}: expected engine.NAME=VALUE with NAME one of {', '.join(fields)}")
        fields[field] = yaml.safe_load(value)
    try:
        return replace(scenario, engine=EngineShape.model_validate(fields))
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInput(f"--set {' --set '.join(overrides)}: {'.'.join(map(str, first['loc']))} {first['msg']}") from None


def _scenario_of(path: Path) -> Scenario | None:
    """The scenario that a run folder keeps beside its log."""
    file = (path if path.is_dir() else path.parent) / SCENARIO
    return load_scenario(file) if file.is_file() else None


def _tokenizer(opened: Opened) -> Tokenizer | None:
    """What turns this log's tokens into text: symbolic tokens are none, and the checkpoint may be on another machine."""
    folder = find(opened.engine["checkpoint"]) if opened.backend != "sim" else None
    return None if folder is None else tokenizer_of(folder)


def _again(*words: object) -> str:
    """The command that shows the same once more."""
    return shlex.join(["caesura", *(str(word) for word in words if word is not None)])


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
        "explanation": msgspec.to_builtins(verdict.explanation),
    }


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
                elif isinstance(entry.event, Delivered):
                    tokens += sum(len(output.tokens) for output in entry.event.outputs)
            status.update(f"{label}: {steps} steps, {tokens} tokens")

        yield hear
