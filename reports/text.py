"""A run as plain text: the verdict, what was violated and why, and each request's text split at its weight boundaries."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from harness.client import ClientView
from harness.conformance import Explanation
from harness.coverage import Coverage
from harness.events import Answered, Asked, Called, Delivered, Entry, Failure, Heard, Launched, Opened, Returned
from harness.replay import Replay, Request
from harness.simulation.figures import figures_of
from harness.situations import SITUATIONS
from harness.state import EngineState, RequestState
from harness.tokenizer import Tokenizer
from harness.trial import Status, Trial
from harness.verdict import Judgement, Violation
from reports.simulation import figure_lines
from reports.words import operation_in_words, timeline_row

WIDTH = 118
MARGIN = 15
TIMELINE_BEFORE, TIMELINE_AFTER = 7, 2
SEGMENT_CHARACTERS = 300
REQUESTS_SHOWN = 8
REFUSED_SHOWN = 6


class Origin(NamedTuple):
    """Where a run lies, and the command that shows it again."""

    folder: Path
    command: str


def render(trial: Trial, tokenizer: Tokenizer | None, origin: Origin) -> str:
    """The whole report. Without a tokenizer, tokens are shown as numbers."""
    lines = [header(trial.opened), _what_ran(trial), *_workload(trial), ""]
    lines += _judgements(trial.verdict.judgements, lambda seq: _timeline(trial, seq, origin))
    if trial.verdict.explanation is not None:
        lines += _explanation(trial.verdict.explanation, trial, origin)
    lines += _reached(trial)
    lines += _refused(trial.entries)
    if trial.scenario is None or trial.scenario.workload is None:  # what thousands of simulated rollouts say is of no interest
        lines += _requests(trial, tokenizer)
    lines += ["", *(f"{'':<{MARGIN}}{reason}" for reason in trial.verdict.reasons)]
    lines += [f"{trial.verdict.status.upper():<{MARGIN}}{trial.scenario.name if trial.scenario else origin.folder}"]
    lines += [f"{'log':<{MARGIN}}{origin.folder}", f"{'again':<{MARGIN}}{origin.command}"]
    return "\n".join(lines) + "\n"


def render_quick(replay: Replay, judgements: Sequence[Judgement], status: Status, origin: Origin) -> str:
    """What the invariants say of a log of which no event was kept: no timeline."""
    assert replay.opened is not None
    tokens = sum(len(request.output) for request in replay.requests.values())
    which = "" if len(replay.requests) == 1 else "s, the last of each id"
    lines = [header(replay.opened), f"log: {tokens} tokens, {len(replay.requests)} request{which}, {replay.seq + 1} events", ""]
    lines += _judgements(judgements, lambda seq: [])
    lines += ["", f"{status.upper():<{MARGIN}}{origin.folder}", f"{'again':<{MARGIN}}{origin.command}"]
    return "\n".join(lines) + "\n"


def header(opened: Opened) -> str:
    """The first line: version, commit, scenario, seed, engine and level."""
    versions = "".join(f" {name} {version}" for name, version in opened.versions.items())
    return (
        f"caesura {opened.caesura}, scenario {opened.scenario[:8] or '-'}, seed {opened.seed}, "
        f"engine {opened.backend} on {opened.device} (level {opened.level}{versions and ','}{versions})"
    )


def summary_row(trial: Trial, folder: Path) -> str:
    """One line for one of several files."""
    explanation = trial.verdict.explanation
    explained = ""
    if explanation and not explanation.mismatch:
        explained = f", {explanation.states} states equal" if explanation.states else ", explained by sim"
    source = trial.scenario.path if trial.scenario and trial.scenario.path else folder
    return f"{trial.verdict.status:<{MARGIN}}{source}  ({len(trial.entries)} events{explained}{_attempt(trial)})"


def _attempt(trial: Trial) -> str:
    return f", run {trial.attempts} times" if trial.attempts > 1 else ""


def coverage_table(coverage: Coverage) -> str:
    """Every situation with its count and first event, those that were not reached too: what coverage.txt holds."""
    lines = [f"{'count':>8} {'first event':>12}  situation"]
    for name, statement in SITUATIONS.items():
        count, first = coverage.get(name, ("-", "-"))
        lines.append(f"{count:>8} {first:>12}  {name}: {statement}")
    return "\n".join(lines) + "\n"


def render_state(state: EngineState, seq: int) -> str:
    """The visible state after event `seq`."""
    pause = "running" if state.pause_mode is None else f"paused ({state.pause_mode}{', pending' if state.pause_pending else ''})"
    weights = f"{state.weight_version}{', update open' if state.update_open else ''}{', OUT OF SERVICE' if state.out_of_service else ''}"
    held = {block: count for block, count in enumerate(state.references) if count}
    lines = [f"state after event {seq}", f"  pause     {pause}", f"  weights   {weights}"]
    lines += _queue("running", state.running) + _queue("waiting", state.waiting)
    lines += [f"  blocked   {', '.join(state.blocked) or '-'}"]
    lines += _wrapped("  held      ", " ".join(f"{block}x{count}" if count > 1 else str(block) for block, count in held.items()) or "-")
    lines += _wrapped("  digests   ", " ".join("=".join(map(str, group)) for group in state.digests) or "-")
    lines += _wrapped("  free      ", " ".join(map(str, state.free)) or "-")
    return "\n".join(lines) + "\n"


def _queue(name: str, requests: Sequence[RequestState]) -> list[str]:
    rows = [_request_row(request) for request in requests] or ["-"]
    return [f"  {name if index == 0 else '':<9} {row}" for index, row in enumerate(rows)]


def _request_row(request: RequestState) -> str:
    tokens = f"{request.num_prompt_tokens}+{len(request.output)} tokens, {request.num_computed_tokens} computed"
    parked = " parked" if request.parked else ""
    return f"{request.id} {request.status}{parked}: {tokens}, {request.num_preemptions} preemptions, blocks {list(request.blocks)}"


def _what_ran(trial: Trial) -> str:
    steps = sum(isinstance(entry.event, Launched) for entry in trial.entries)
    given = Heard if trial.from_outside else Delivered
    tokens = sum(len(output.tokens) for entry in trial.entries if isinstance(entry.event, given) for output in entry.event.outputs)
    requests = len(trial.view.requests) if trial.from_outside and trial.view else len(trial.replay.requests)
    counted = f"{tokens} tokens heard" if trial.from_outside else f"{steps} steps, {tokens} tokens"
    end = f"ended {trial.closed.why}{_attempt(trial)}" if trial.closed else "no end was seen, so what must hold at the end was not judged"
    name = trial.scenario.name if trial.scenario else "log"
    return f"{name}: {counted}, {requests} requests, {len(trial.entries)} events; {end}"


def _workload(trial: Trial) -> list[str]:
    """How a simulated workload fared."""
    workload = trial.scenario.workload if trial.scenario else None
    return figure_lines(figures_of(trial.entries, workload), margin=MARGIN) if workload is not None else []


def _judgements(judgements: Sequence[Judgement], timeline: Callable[[int], list[str]]) -> list[str]:
    """What is violated, earliest first and the first one with its timeline; what could not be checked; what holds."""
    by_status: dict[str, list[Judgement]] = {"violated": [], "not-checkable": [], "holds": []}
    for judgement in judgements:
        by_status[judgement.status].append(judgement)
    lines = []
    for place, judgement in enumerate(sorted(by_status["violated"], key=lambda judgement: judgement.violations[0].seq)):
        lines += _violated(judgement, timeline if place == 0 else lambda seq: [])
    lines += [f"{'not checkable':<{MARGIN}}{judgement.invariant}: {judgement.reason}" for judgement in by_status["not-checkable"]]
    lines += [f"{'holds':<{MARGIN}}{judgement.invariant}: {judgement.reason}" for judgement in by_status["holds"] if judgement.checked]
    plain = [judgement.invariant for judgement in by_status["holds"] if not judgement.checked]
    return lines + (_wrapped(f"{'holds':<{MARGIN}}", ", ".join(plain)) if plain else [])


def _violated(judgement: Judgement, timeline: Callable[[int], list[str]]) -> list[str]:
    """The first violation in words and with the timeline around it, the others by their sentences."""
    first, *others = judgement.violations
    more = f" ({judgement.more} more not shown)" if judgement.more else ""
    lines = [f"{'violated':<{MARGIN}}{judgement.invariant}: {judgement.reason}{more}", *_violation(first)]
    lines += timeline(first.seq)
    return lines + [_cut(f"{'':<{MARGIN}}also      event {other.seq}: {other.sentence}") for other in others]


def _violation(violation: Violation) -> list[str]:
    """What, expected, got, why: with the timeline under 25 lines."""
    indent = f"{'':<{MARGIN}}"
    lines = _wrapped(f"{indent}event {violation.seq}: ", violation.sentence)
    lines += _wrapped(f"{indent}expected  ", violation.expected, most=3) + _wrapped(f"{indent}got       ", violation.got, most=3)
    for index, cause in enumerate(violation.cause[-4:]):
        lines.append(_cut(f"{indent}{'because' if index == 0 else '':<9} event {cause.seq}: {cause.what}"))
    return lines


def _timeline(trial: Trial, seq: int, origin: Origin) -> list[str]:
    """At most ten rows around an event, which is marked, and the command that shows it again."""
    indent = f"{'':<{MARGIN}}"
    around = trial.entries[max(0, seq - TIMELINE_BEFORE) : seq + TIMELINE_AFTER + 1]
    several = trial.view is not None and not trial.from_outside
    rows = [_cut(f"{indent}{'>' if entry.seq == seq else ' '}{timeline_row(entry, writer=several)}") for entry in around]
    return [*rows, f"{indent}again     {origin.command}"]


def _explanation(explanation: Explanation, trial: Trial, origin: Origin) -> list[str]:
    engine = trial.opened.backend
    states = f", {explanation.states} whole states" if explanation.states else ""
    counted = f"{explanation.transactions} operations and steps, {explanation.events} events{states}"
    mismatch = explanation.mismatch
    if mismatch is None:
        same = f"{'holds':<{MARGIN}}sim: its events are those of {engine}, so each line above is said of both"
        return [same, f"{'holds':<{MARGIN}}sim explains {engine}: {counted}"]
    indent = f"{'':<{MARGIN}}"
    lines = [f"{'violated':<{MARGIN}}sim does not explain {engine}, after {counted}"]
    lines += _wrapped(f"{indent}event {mismatch.seq}: ", mismatch.sentence)
    lines += _wrapped(f"{indent}model     ", mismatch.expected, most=4) + _wrapped(f"{indent}{engine:<9} ", mismatch.got, most=4)
    return [*lines, *_timeline(trial, mismatch.seq, origin)]


def _reached(trial: Trial) -> list[str]:
    """How many situations came about, and which of them the scenario had named."""
    named = [name for name in trial.scenario.expect.reaches if name in trial.coverage] if trial.scenario else []
    text = f"{len(trial.coverage)} of {len(SITUATIONS)} situations{'; as expected: ' if named else ''}{', '.join(named)}"
    return _wrapped(f"{'reaches':<{MARGIN}}", text)


def _refused(entries: Sequence[Entry]) -> list[str]:
    """Calls that were answered with an error, the first few in words: as clients tell if they kept a log, else as the engine does."""
    calls: dict[int, dict[str, Any]] = {}
    refused: list[tuple[int, Failure]] = []
    of_clients = any(isinstance(entry.event, Asked) for entry in entries)
    for entry in entries:
        match entry.event:
            case Asked(call=number, operation=operation) if of_clients:
                calls[number] = operation
            case Called(op=number, operation=operation) if not of_clients:
                calls[number] = operation
            case Answered(call=number, error=Failure() as error) if of_clients:
                refused.append((number, error))
            case Returned(op=number, error=Failure() as error) if not of_clients:
                refused.append((number, error))
            case _:
                pass
    lines = []
    for place, (number, error) in enumerate(refused[:REFUSED_SHOWN]):
        words = f"#{number} {operation_in_words(calls.get(number, {}))}: {error.code}, {error.message}"
        lines.append(_cut(f"{'refused' if place == 0 else '':<{MARGIN}}{words}"))
    return lines + ([f"{'':<{MARGIN}}and {len(refused) - REFUSED_SHOWN} more"] if len(refused) > REFUSED_SHOWN else [])


def _requests(trial: Trial, tokenizer: Tokenizer | None) -> list[str]:
    """Requests whose output two weight versions share first: their text split at the boundary."""
    if trial.from_outside and trial.view is not None:
        return _heard(trial.view, tokenizer)
    requests = sorted(trial.replay.requests.values(), key=lambda request: -len(request.spans()))
    lines = [""] if requests else []
    texts = _prompt_texts(trial.entries)
    for request in requests[:REQUESTS_SHOWN]:
        lines += _request(request, texts.get(request.id), tokenizer)
    if len(requests) > REQUESTS_SHOWN:
        lines.append(f"{len(requests) - REQUESTS_SHOWN} more requests")
    return lines


def _request(request: Request, text: str | None, tokenizer: Tokenizer | None) -> Iterator[str]:
    reason = f"{request.finished.reason} after" if request.finished else f"{request.status} with"
    lives = f", {request.lives} lives" if request.lives > 1 else ""
    yield f"{request.id:<{MARGIN}}{reason} {len(request.output)} tokens{lives}"
    prompt = _quoted(text) if text is not None else _shown(request.prompt or (), tokenizer)
    yield from _wrapped(f"{'  prompt':<{MARGIN}}", prompt, most=3)
    for version, start, end in request.spans():
        label = f"  {version} [{start}:{end}]"
        yield from _wrapped(f"{label:<{MARGIN}}", _shown(request.output[start:end], tokenizer), most=3)


def _heard(view: ClientView, tokenizer: Tokenizer | None) -> list[str]:
    """What clients heard of each request."""
    lines = [""] if view.requests else []
    for request in view.requests[:REQUESTS_SHOWN]:
        end = f"{request.finish_reason} after" if request.finish_reason else "no end, with"
        lines.append(f"{request.submit.id:<{MARGIN}}{end} {len(request.tokens)} tokens")
        lines += _wrapped(f"{'  heard':<{MARGIN}}", _shown(request.tokens, tokenizer), most=3)
    return lines + ([f"{len(view.requests) - REQUESTS_SHOWN} more requests"] if len(view.requests) > REQUESTS_SHOWN else [])


def _prompt_texts(entries: Sequence[Entry]) -> dict[str, str]:
    submits = (entry.event.operation.get("submit") for entry in entries if isinstance(entry.event, Called))
    return {submit["id"]: submit["prompt"]["text"] for submit in submits if submit and "text" in submit["prompt"]}


def _shown(tokens: Sequence[int], tokenizer: Tokenizer | None) -> str:
    return " ".join(map(str, tokens)) if tokenizer is None else _quoted(tokenizer.decode(tuple(tokens)))


def _quoted(text: str) -> str:
    shown = text if len(text) <= SEGMENT_CHARACTERS else text[:SEGMENT_CHARACTERS] + "..."
    return '"' + shown.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"') + '"'


def _cut(line: str) -> str:
    return line if len(line) <= WIDTH else line[: WIDTH - 3] + "..."


def _wrapped(label: str, text: str, *, most: int | None = None) -> list[str]:
    """`label text` over as many lines as it takes, at most `most`, the rest indented under the text."""
    first = label if label.endswith(" ") else label + " "
    wrapper = textwrap.TextWrapper(WIDTH, initial_indent=first, subsequent_indent=" " * len(first), break_on_hyphens=False)
    wrapper.max_lines, wrapper.placeholder = most, " ..."
    return wrapper.wrap(text) or [label]
