"""The verb `fuzz`: settings in, a campaign run and reported, an exit code out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from harness.errors import INTERRUPTED, BadInput
from harness.fuzz import summary
from harness.fuzz.campaign import Campaign, Result
from harness.fuzz.hunt import Settings, Tally
from harness.fuzz.known import Known, read_corpus, write_corpus
from harness.fuzz.ledger import Plan, read_ledger
from harness.fuzz.team import LocalTeam, Team
from harness.junit import TestCase, write_junit
from harness.runs import REPORT, RunFolder
from harness.scenario import EngineShape
from harness.trial import EXIT_CODES, Status

CORPUS = "corpus.yaml"
REGRESSIONS = Path("scenarios/regressions")
DIFFERENCES = Path("scenarios/differences")
"""What vLLM is known to do otherwise (docs/vllm.md)."""
VLLM = ("vllm", "vllm-scheduler")
DEFAULT_S = 60.0
_UNITS = {"s": 1, "m": 60, "h": 3600}

Progress = Callable[[Tally, int], object]


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What the command line asked for."""

    engine: str
    time: str | None
    cases: int | None
    seed: int
    jobs: int
    ray: str | None
    """Address of a cluster; None: this machine."""
    overrides: Sequence[str]
    runs: Path
    corpus: Path | None
    resume: Path | None
    junit: Path | None
    as_json: bool


def fuzz(asked: Asked) -> int:
    """Look for failures. Exit code 1 if there are new ones, 130 if it was interrupted without any."""
    plan, folder = _resumed(asked) if asked.resume is not None else _begun(asked)
    seconds = None if asked.time is None else seconds_of(asked.time)
    if seconds is None and plan.cases is None:
        seconds = DEFAULT_S
    known = read_corpus(asked.corpus) if asked.corpus is not None else []
    settings = Settings(overrides=plan.overrides)
    with _progress(plan) as progress:
        campaign = Campaign(
            plan,
            folder.path,
            team=_team(plan, settings, folder, asked.ray),
            jobs=asked.jobs,
            seconds=seconds,
            known=known,
            files=[file.resolve() for folder in _written_down(plan.engine) for file in sorted(folder.glob("*.yaml"))],
            progress=progress,
        )
        result = campaign.run()
    _leave(result, plan, folder, asked, known)
    status: Status = summary.verdict(result)  # type: ignore[assignment]
    return INTERRUPTED if result.interrupted and not result.new else EXIT_CODES[status]


def _written_down(engine: str) -> tuple[Path, ...]:
    """Folders of scenarios that show what is known of an engine."""
    return (REGRESSIONS, DIFFERENCES) if engine in VLLM else (REGRESSIONS,)


def _team(plan: Plan, settings: Settings, folder: RunFolder, ray: str | None) -> Team[Any]:
    if ray is None:
        return LocalTeam(plan.engine, settings, folder.path)
    from harness.fuzz.ray_team import RayTeam

    return RayTeam(plan.engine, settings, ray)


def seconds_of(text: str) -> float:
    """`90`, `90s`, `1.5m` or `1h` in seconds.

    Raises:
        BadInput: it is no such time.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text.strip())
    if match is None or not (seconds := float(match[1]) * _UNITS[match[2] or "s"]):
        raise BadInput(f"--time {text}: expected a time above zero, as in 60s, 10m or 1h")
    return seconds


def overrides_of(overrides: Sequence[str]) -> Mapping[str, Any]:
    """`engine.NAME=VALUE` as fields of the engine's shape.

    Raises:
        BadInput: there is no such field, or it cannot have this value.
    """
    fields: dict[str, Any] = {}
    for override in overrides:
        name, equals, value = override.partition("=")
        field = name.removeprefix("engine.")
        if not equals or field == name or field not in EngineShape.model_fields:
            raise BadInput(f"--set {override}: expected engine.NAME=VALUE with NAME one of {', '.join(EngineShape.model_fields)}")
        fields[field] = yaml.safe_load(value)
    try:
        EngineShape.model_validate({"max_num_batched_tokens": 1 << 30, **fields})
    except ValidationError as error:
        first = error.errors()[0]
        raise BadInput(f"--set {' --set '.join(overrides)}: {'.'.join(map(str, first['loc']))} {first['msg']}") from None
    return fields


def _begun(asked: Asked) -> tuple[Plan, RunFolder]:
    plan = Plan(engine=asked.engine, seed=asked.seed, cases=asked.cases, overrides=overrides_of(asked.overrides))
    return plan, RunFolder.make(asked.runs, f"fuzz {asked.engine}")


def _resumed(asked: Asked) -> tuple[Plan, RunFolder]:
    """The plan of the folder; of the arguments, only the time and the number of processes count."""
    assert asked.resume is not None
    return read_ledger(asked.resume).plan, RunFolder(asked.resume)


def _leave(result: Result, plan: Plan, folder: RunFolder, asked: Asked, known: Sequence[Known]) -> None:
    """Write and print everything that outlives the campaign."""
    paths = summary.write_minimal(folder, plan, result.new)
    found = [Known(failure.signature, str(paths.get(index, folder.path))) for index, failure in enumerate(result.new)]
    write_corpus(folder.path / CORPUS, found)
    if asked.corpus is not None:
        write_corpus(asked.corpus, [*known, *found])
    text = summary.words(result, plan, paths, folder.path)
    folder.write(REPORT, text)
    folder.publish()
    if asked.junit is not None:
        write_junit(asked.junit, f"caesura fuzz {plan.engine}", _test_cases(result, plan, paths))
    print(json.dumps(summary.data(result, plan, paths, folder.path)) if asked.as_json else text, end="\n" if asked.as_json else "")


def _test_cases(result: Result, plan: Plan, paths: Mapping[int, Path]) -> list[TestCase]:
    """One for each new failure, and one that passed for all the cases that showed none."""
    clean = TestCase(name=f"{result.tally.cases - result.failing} cases from seed {plan.seed}", seconds=result.seconds)
    tests = [clean]
    for index, failure in enumerate(result.new):
        finding = failure.finding or failure.shown
        where = f"\n{summary.again(finding.id, plan.engine, paths[index])}" if index in paths else ""
        tests.append(TestCase(name=f"{finding.id}, seed {failure.first.seed}", failure=f"{finding.sentence}{where}\n{finding.detail}"))
    return tests


@contextmanager
def _progress(plan: Plan) -> Iterator[Progress]:
    """A line on stderr that counts while the campaign goes on; without a terminal, only that it began."""
    from rich.console import Console

    console = Console(stderr=True)
    label = f"fuzzing {plan.engine} from seed {plan.seed}"
    if not console.is_terminal:
        console.print(f"{label} ...", highlight=False)
        yield lambda tally, ways: None
        return
    with console.status(label) as status:

        def hear(tally: Tally, ways: int) -> None:
            rate = tally.operations / tally.seconds if tally.seconds else 0
            status.update(f"{label}: {tally.cases:,} cases, {rate:,.0f} operations/s a process, {ways} ways to fail")

        yield hear
