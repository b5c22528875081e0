"""What a campaign leaves for people and machines: minimal scenario files, a summary in words, JSON."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from typing import Any, get_args

from harness.fuzz.campaign import Failure, Result
from harness.fuzz.case import CONFORMANCE, ENDS
from harness.fuzz.ledger import Plan
from harness.runs import RunFolder
from harness.scenario import Expect, dump

MINIMAL = "minimal.yaml"
MARGIN = 15
SHOWN = 8
"""Kinds in a line of counts; the rest are left out."""
STACK_LINES = 12
_ENDS = get_args(Expect.model_fields["ends"].annotation)


def write_minimal(folder: RunFolder, plan: Plan, failures: list[Failure]) -> dict[int, Path]:
    """A scenario file for each new failure that was shrunk; returns them by place in the list. The first is `minimal.yaml`."""
    paths: dict[int, Path] = {}
    for index, failure in enumerate(failures):
        if failure.minimal is None:
            continue
        name = MINIMAL if not paths else f"minimal-{len(paths) + 1}.yaml"
        folder.write(name, minimal_text(failure, plan.engine, folder.path / name))
        paths[index] = folder.path / name
    return paths


def minimal_text(failure: Failure, engine: str, path: Path) -> str:
    """The minimal case as a scenario file, with what it shows and how to see it on top."""
    assert failure.minimal is not None
    finding = failure.finding or failure.shown
    ends = failure.ended if failure.ended in _ENDS and finding.id != ENDS else "drained"
    name = f"{finding.id} on {engine}, seed {failure.first.seed}"
    scenario = failure.minimal.scenario(name, expect=Expect.model_validate({"ends": ends}))
    return f"# {finding.id}: {finding.sentence}\n# {again(finding.id, engine, path)}\n{dump(scenario)}"


def again(id: str, engine: str, path: Path) -> str:
    """The command that shows it: the model is asked only by `diff`."""
    if id == CONFORMANCE:
        return shlex.join(["caesura", "diff", str(path), "--engines", f"sim,{engine}"])
    return shlex.join(["caesura", "run", str(path), "--engine", engine])


def words(result: Result, plan: Plan, paths: dict[int, Path], folder: Path) -> str:
    """The summary."""
    lines = [line for index, failure in enumerate(result.new) for line in _failure(failure, plan, paths.get(index))]
    known = [failure for failure in result.failures if failure.known is not None]
    lines += [_row("known", f"{one.signature.id}, {_counted(one.count, 'case')}: {one.known}") for one in known]
    lines += [_row("not recalled", f"{file}: {why}") for file, why in result.not_recalled.items()]
    if result.uncounted:
        lines.append(_row("not counted", f"{_counted(result.uncounted, 'case')} that failed: what is known was not recalled"))
    tally = result.tally
    rate = tally.operations / tally.seconds if tally.seconds else 0.0
    lines += [_row("cases", f"{tally.cases:,}, {tally.operations:,} operations and steps, {rate:,.0f}/s a process, {result.seconds:.1f} s")]
    lines += [_row("operations", _counts(tally.verbs)), _row("reached", _shares(tally.reached, tally.cases))]
    lines += [_row("ended", _counts(tally.ended))]
    if result.deaths:
        lines.append(_row("processes", f"{result.deaths} died and were replaced; their cases were run again"))
    if result.unplaced:
        lines.append(_row("processes", f"{result.unplaced} found no room on the cluster; their cases were run by the others"))
    if result.leaks:
        lines.append(_row("leaks", f"{len(result.leaks)} processes had grown by {max(result.leaks):,} MB and were replaced"))
    lines += [_row(verdict(result).upper(), _verdict(result, plan)), _row("log", str(folder))]
    lines += [_row("again", begin_again(plan))] if not result.interrupted else [_row("go on", f"caesura fuzz --resume {folder}")]
    return "\n".join(lines) + "\n"


def verdict(result: Result) -> str:
    """`violated` if there is a new failure, `unknown` if nothing was run, it was interrupted or cases were not counted, else `holds`."""
    if result.new:
        return "violated"
    return "unknown" if result.interrupted or result.uncounted or not result.tally.cases else "holds"


def data(result: Result, plan: Plan, paths: dict[int, Path], folder: Path) -> dict[str, Any]:
    """The same for machines."""
    tally = result.tally
    failures = [
        {
            "id": failure.signature.id,
            "sentence": (failure.finding or failure.shown).sentence,
            "expected": (failure.finding or failure.shown).expected,
            "known": None,
            "cases": failure.count,
            "seed": failure.first.seed,
            "operations": failure.shown.operations,
            "also": _also(failure),
            "minimal": str(paths[index]) if index in paths else None,
            "minimal_operations": len(failure.minimal.operations) if failure.minimal else None,
        }
        for index, failure in enumerate(result.new)
    ]
    known = [{"id": one.signature.id, "known": one.known, "cases": one.count} for one in result.failures if one.known is not None]
    return {
        "status": verdict(result),
        "interrupted": result.interrupted,
        **plan.data(),
        "folder": str(folder),
        "failures": failures,
        "known": known,
        "cases_run": tally.cases,
        "operations": tally.operations,
        "seconds": round(result.seconds, 3),
        "process_seconds": round(tally.seconds, 3),
        "verbs": dict(tally.verbs),
        "reached": dict(tally.reached),
        "ended": dict(tally.ended),
        "deaths": result.deaths,
        "leaks": result.leaks,
        "unplaced": result.unplaced,
        "cases_not_counted": result.uncounted,
        "not_recalled": result.not_recalled,
    }


def begin_again(plan: Plan) -> str:
    sets = [word for name, value in plan.overrides.items() for word in ("--set", f"engine.{name}={value}")]
    cases = ["--cases", str(plan.cases)] if plan.cases is not None else []
    return shlex.join(["caesura", "fuzz", "--engine", plan.engine, "--seed", str(plan.seed), *cases, *sets])


def _failure(failure: Failure, plan: Plan, path: Path | None) -> list[str]:
    first = failure.first
    finding = failure.finding or failure.shown
    also = "; also " + ", ".join(ids) if (ids := _also(failure)) else ""
    after = _counted(failure.shown.operations, "operation")
    lines = [_row("violated", f"{finding.id}: {finding.sentence}")]
    if finding.expected:
        lines.append(_row("", f"expected {finding.expected}"))
    lines += [_row("", f"{_counted(failure.count, 'case')}, first seed {first.seed} after {after}{also}")]
    lines += [_row("", line) for line in finding.detail.splitlines()[-STACK_LINES:]]
    if path is not None and failure.minimal is not None:
        lines += [_row("", f"minimal   {_counted(len(failure.minimal.operations), 'operation')}, {path}")]
        lines += [_row("", f"again     {again(finding.id, plan.engine, path)}")]
    else:
        alone = Plan(engine=plan.engine, seed=first.seed, cases=1, overrides=plan.overrides)
        lines += [_row("", f"again     {begin_again(alone)}")]
    return [*lines, ""]


def _also(failure: Failure) -> list[str]:
    """Ids of what else the first case showed."""
    return list(dict.fromkeys(finding.id for finding in failure.first.findings if finding.id != failure.shown.id))


def _verdict(result: Result, plan: Plan) -> str:
    found = f"{_counted(len(result.new), 'new way')} to fail" if result.new else "no new failure"
    return f"{plan.engine}, seeds from {plan.seed}: {found}{'; interrupted' if result.interrupted else ''}"


def _counts(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.most_common(SHOWN))


def _shares(reached: Counter[str], cases: int) -> str:
    """In how many cases of a hundred; what every case reaches says nothing."""
    shares = [(name, 100 * count / cases) for name, count in reached.most_common() if count < 0.9 * cases]
    return ", ".join(f"{name} {share:.0f}%" if share >= 1 else f"{name} {share:.2g}%" for name, share in shares)


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _row(name: str, text: str) -> str:
    return f"{name:<{MARGIN}}{text}".rstrip()
