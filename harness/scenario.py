"""Scenario files: operations on a timeline, the engine they are put to, and what is to come of it.

A file is checked when it is loaded: a field that does not exist, a trigger that can never
fire and a name that nobody has are errors with the line that they are in, so that what is
left for a run to find out is about engines. Fuzzing and shrinking write the same files.
A file has a timeline, a workload to simulate, or both.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import ConfigDict, Field, create_model, model_validator
from pydantic.json_schema import SkipJsonSchema

from harness.operations import DRIVER_VERBS, OPERATIONS, Abort, Data, Handle, Milliseconds, Mode, Operation, Submit, to_data
from harness.scenario_source import Place, Problem, ScenarioError, Source, suggestion
from harness.situations import SITUATIONS

SCHEMA = 1
"""Version of the format of scenario files. The loader refuses a newer one."""

BOUND_MS = 10_000
"""How long a live engine's answers may take, if a file does not say."""

Size = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
Names = Annotated[tuple[Name, ...], Field(strict=False)]
Situation = Annotated[str, Field(json_schema_extra={"enum": list(SITUATIONS)})]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
FaultId = Annotated[str, Field(pattern=r"^[A-Za-z0-9]+(-[a-z0-9]+)*$")]


class EngineShape(Data):
    """The `engine:` section: what an engine is started with. Blocks are counted in usable ones, sizes in tokens."""

    checkpoint: str = Field(default="tiny", min_length=1)
    """`tiny`, `smollm2` or the path of a checkpoint folder."""
    block_size: Size = 16
    num_blocks: Size = 64
    max_model_len: Size = 512
    max_num_seqs: Size = 8
    max_num_batched_tokens: Size = 256
    prefix_caching: bool = True
    long_prefill_token_threshold: int = Field(default=0, ge=0)
    """The most tokens of one prompt in a step; 0 = no limit."""
    late_requests: Literal["queue", "reject", "block"] = "queue"
    async_scheduling: bool = False
    """One step is in flight while the next is scheduled and launched."""
    host_blocks: int = Field(default=0, ge=0)
    """Slots of a tier in host memory that keeps evicted blocks; 0 = none."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"

    @model_validator(mode="after")
    def _every_running_request_gets_a_token(self) -> EngineShape:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than max_num_seqs {self.max_num_seqs}; "
                "expected at least one token a step for each running request: raise the one or lower the other"
            )
        return self


class Needs(Data):
    """What a backend must be able to show: 0 client, 1 schedule, 2 blocks, 3 numbers."""

    level: int = Field(default=0, ge=0, le=3)


class Roofline(Data):
    """A step takes the longer of two times, moving bytes and computing, and `launch_us` on top (Williams et al., CACM 2009).

    It moves the weights once and the KV of every token that its requests attend to; it computes `gflop_per_token` for
    each token of its batch (for a dense model, 2 for each billion parameters; that of attention is left out).
    """

    weights_gb: Positive
    kv_kb_per_token: NotNegative
    gflop_per_token: Positive
    memory_gb_per_s: Positive
    compute_tflop_per_s: Positive
    launch_us: NotNegative = 0


class Latency(Data):
    """What a step costs in virtual time: always the same, or what its batch says."""

    step_ms: Milliseconds = 1
    roofline: Roofline | SkipJsonSchema[None] = None

    @model_validator(mode="after")
    def _one_model(self) -> Latency:
        if self.roofline is not None and "step_ms" in self.model_fields_set:
            raise ValueError("expected `step_ms` or `roofline`, not both: each says what a step costs")
        return self


class Tail(Data):
    """Heavy-tailed lengths in tokens: lognormal, half of them up to `median`, one in a hundred beyond `p99`."""

    median: Size
    p99: Size

    @model_validator(mode="after")
    def _the_median_is_less(self) -> Tail:
        if self.p99 < self.median:
            raise ValueError(f"got p99 {self.p99} below the median {self.median}; expected it there or above")
        return self


def _exactly_one(*keys: str) -> ConfigDict:
    return ConfigDict(json_schema_extra={"oneOf": [{"required": [key]} for key in keys]})


class Arrivals(Data):
    """When rollouts are handed in. `workers`: so many at a time, the next as one ends. `per_s`: a Poisson process."""

    model_config = _exactly_one("workers", "per_s")

    workers: Size | SkipJsonSchema[None] = None
    per_s: Positive | SkipJsonSchema[None] = None

    @model_validator(mode="after")
    def _one_kind(self) -> Arrivals:
        if (self.workers is None) == (self.per_s is None):
            raise ValueError("expected exactly one of `workers` and `per_s`")
        return self


class Staleness(Data):
    """How many updates old a rollout's oldest token may be when it is trained on.

    `drop` (TRL): a trainer throws older rollouts away. `hold` (AReaL): rollouts are handed in only as far as
    (bound + version + 1) batches reach, so that none is dropped and few are older; a part of a batch counts, too (verl's threshold).
    """

    bound: NotNegative
    beyond: Literal["drop", "hold"]


class Trainer(Data):
    """Trains on `batch` rollouts as soon as so many have ended, or every so many steps of the engine, beside generation;
    then pauses, sends new weights in `parts` that take `transfer_ms` together, and resumes."""

    model_config = _exactly_one("batch", "every_steps")

    batch: Size | SkipJsonSchema[None] = None
    every_steps: Size | SkipJsonSchema[None] = None
    train_ms: Milliseconds
    mode: Mode
    clear_cache: bool
    transfer_ms: Milliseconds
    parts: int = Field(default=1, ge=1, le=16)
    staleness: Staleness | SkipJsonSchema[None] = None

    @model_validator(mode="after")
    def _one_rhythm(self) -> Trainer:
        if (self.batch is None) == (self.every_steps is None):
            raise ValueError("expected exactly one of `batch` and `every_steps`")
        if self.batch is None and self.staleness is not None:
            raise ValueError("`staleness` bounds what a batch may hold; expected it with `batch`")
        return self


class Workload(Data):
    """Rollouts to simulate in virtual time: `samples` of each prompt, handed in one by one in that order."""

    rollouts: Size
    samples: Size = 1
    arrivals: Arrivals
    prompt: Tail
    output: Tail
    aborted: Literal["continue", "restart"] = "continue"
    """What a client does when a pause aborted its rollout: hand in prompt and output so far, or begin anew."""
    retry_ms: NotNegative = 0
    """How long it waits before that, and between tries when it is refused."""
    salt_by_version: bool = False
    """Requests have the weight version as cache salt, so that none hits blocks of an older one."""
    trainer: Trainer | SkipJsonSchema[None] = None


class Expect(Data):
    """What is to come of a run, besides that every invariant holds."""

    reaches: Annotated[tuple[Situation, ...], Field(strict=False)] = ()
    """Situations, by name, that must come about; else the run proves nothing."""
    ends: Literal["drained", "paused", "out-of-service"] = "drained"
    violates: Names = ()
    """Invariants, by id: exactly these are violated. In a file with a `fault`, while that is planted."""


_TRIGGERS = "{step: N}, {ms: T}, {request: ID, tokens: N}, {request: ID, state: STATE}, {returned: NAME}, {called: NAME}"

_EXACTLY_ONE_TRIGGER: dict[str, Any] = {
    "dependentSchemas": {"request": {"oneOf": [{"required": ["tokens"]}, {"required": ["state"]}]}},
    "dependentRequired": {"tokens": ["request"], "state": ["request"]},
    "oneOf": [
        *({"required": [key]} for key in ("step", "request", "returned", "called")),
        {"required": ["ms"], "maxProperties": 1},
    ],
}


class When(Data):
    """A trigger: it fires once, at the first step boundary at which its condition is true.

    `step`: so many forward steps were made. `request` with `tokens`: it has so many output tokens; with
    `state`: it has been in that state. `returned`, `called`: the call of that name, whatever came of it.
    `ms` delays any of these by virtual time; alone, it counts from the start.
    """

    model_config = ConfigDict(json_schema_extra=_EXACTLY_ONE_TRIGGER)

    step: Size | SkipJsonSchema[None] = None
    request: Handle | SkipJsonSchema[None] = None
    tokens: Size | SkipJsonSchema[None] = None
    state: Literal["accepted", "blocked", "running", "preempted", "finished"] | SkipJsonSchema[None] = None
    returned: Handle | SkipJsonSchema[None] = None
    called: Handle | SkipJsonSchema[None] = None
    ms: Milliseconds | SkipJsonSchema[None] = None

    @model_validator(mode="after")
    def _exactly_one_trigger(self) -> When:
        kinds = [kind for kind in (self.step, self.request, self.returned, self.called) if kind is not None]
        details = [detail for detail in (self.tokens, self.state) if detail is not None]
        alone = not kinds and self.ms is not None
        if (len(kinds) != 1 and not alone) or len(details) != (self.request is not None):
            raise ValueError(f"expected exactly one of {_TRIGGERS}; each may add `ms`, a delay")
        return self


@dataclass(frozen=True, kw_only=True)
class TimelineEntry:
    """One operation and when it is called; no `when`: right after the entry above was called."""

    operation: Operation
    when: When | None = None
    name: str | None = None
    """The file's `as`: what later triggers call this call."""
    line: int | None = field(default=None, compare=False)
    """Where in the file it begins; None if it came from no file."""


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A scenario, checked. Equal scenarios do the same, wherever they came from."""

    name: str
    engine: EngineShape
    timeline: tuple[TimelineEntry, ...]
    workload: Workload | None = None
    """What is simulated beside the timeline; only the model can."""
    needs: Needs = field(default_factory=Needs)
    latency: Latency = field(default_factory=Latency)
    bound_ms: float = BOUND_MS
    """Of a live engine: how long an answer may take, and how long nothing may be heard while something is waited for."""
    expect: Expect = field(default_factory=Expect)
    fault: str | None = None
    """The planted fault under which `expect.violates` comes true; without it, every invariant holds."""
    path: Path | None = field(default=None, compare=False)
    text: str = field(default="", compare=False)
    """The file's text; empty, as is the digest, if there was no file."""
    digest: str = field(default="", compare=False)
    """SHA-256 of the file's bytes, hexadecimal."""

    @classmethod
    def from_operations(cls, engine: EngineShape, operations: Sequence[Operation], *, name: str = "operations") -> Scenario:
        """The operations one right after the other, without triggers.

        Raises:
            ScenarioError: an operation names a request that none submits.
        """
        timeline = tuple(TimelineEntry(operation=operation) for operation in operations)
        if problems := list(_impossible(timeline, engine)):
            raise ScenarioError(*(str(problem) for problem in problems))
        return cls(name=name, engine=engine, timeline=timeline)


def _arguments(kind: type[Operation]) -> Any:
    """What may stand behind a verb; nothing only where every argument has a default (None: the verb is absent)."""
    return kind | (SkipJsonSchema[None] if any(argument.is_required() for argument in kind.model_fields.values()) else None)


_ARGUMENTS: dict[str, Any] = {verb: (_arguments(kind), None) for verb, kind in OPERATIONS.items()}
_Verbs = create_model("_Verbs", __base__=Data, **_ARGUMENTS)


class _EntryForm(_Verbs):
    """One operation, named by its verb, with at most one trigger."""

    model_config = ConfigDict(json_schema_extra={"oneOf": [{"required": [verb]} for verb in OPERATIONS]})

    when: When | SkipJsonSchema[None] = None
    name: Handle | SkipJsonSchema[None] = Field(default=None, alias="as")

    @model_validator(mode="before")
    @classmethod
    def _bare_verb_has_no_arguments(cls, data: Any) -> Any:
        """`resume:` says the same as `resume: {}`."""
        if not isinstance(data, dict):
            return data
        return {key: {} if value is None and key in OPERATIONS else value for key, value in data.items()}

    @model_validator(mode="after")
    def _exactly_one_operation(self) -> _EntryForm:
        if len(self._operations()) != 1:
            raise ValueError(f"expected exactly one operation of {', '.join(OPERATIONS)}")
        return self

    def _operations(self) -> list[Operation]:
        return [operation for verb in OPERATIONS if (operation := getattr(self, verb)) is not None]

    @property
    def operation(self) -> Operation:
        return self._operations()[0]


class _ScenarioForm(Data):
    """A scenario file of Caesura."""

    model_config = ConfigDict(json_schema_extra={"anyOf": [{"required": ["timeline"]}, {"required": ["workload"]}]})

    schema_version: Literal[1] = Field(alias="schema")
    name: str = Field(min_length=1)
    needs: Needs = Needs()
    engine: EngineShape = EngineShape()
    latency: Latency = Latency()
    bound_ms: Milliseconds = BOUND_MS
    workload: Workload | SkipJsonSchema[None] = None
    timeline: Annotated[tuple[_EntryForm, ...], Field(strict=False)] = ()
    expect: Expect = Expect()
    fault: FaultId | SkipJsonSchema[None] = None


def load_scenario(path: str | Path) -> Scenario:
    """Read a scenario file.

    Raises:
        ScenarioError: it cannot be read, is no scenario, or its timeline cannot happen; one line for each problem,
            `file:line: field: what was got; what is expected`.
    """
    source = Source.read(Path(path))
    _refuse_newer_schema(source)
    form = source.validate(_ScenarioForm)
    timeline = tuple(
        TimelineEntry(operation=entry.operation, when=entry.when, name=entry.name, line=source.line(("timeline", index)))
        for index, entry in enumerate(form.timeline)
    )
    if problems := [*_impossible(timeline, form.engine), *_unsimulated(form), *_unknown_situations(form.expect)]:
        raise source.error(problems)
    return Scenario(
        name=form.name,
        engine=form.engine,
        timeline=timeline,
        workload=form.workload,
        needs=form.needs,
        latency=form.latency,
        bound_ms=form.bound_ms,
        expect=form.expect,
        fault=form.fault,
        path=source.path,
        text=source.text,
        digest=source.digest,
    )


def _refuse_newer_schema(source: Source) -> None:
    """Before anything else: the rest of a newer file would only seem to be wrong."""
    version = source.data.get("schema") if isinstance(source.data, dict) else None
    if isinstance(version, int) and version > SCHEMA:
        raise source.error([Problem(("schema",), f"got {version}; expected {SCHEMA}: this file needs a newer Caesura")])


def _unknown_situations(expect: Expect) -> Iterator[Problem]:
    for index, name in enumerate(expect.reaches):
        if name not in SITUATIONS:
            message = f"got {name!r}{suggestion(name, SITUATIONS)} expected a situation of docs/situations.md"
            yield Problem(("expect", "reaches", index), message)


def _impossible(timeline: Sequence[TimelineEntry], engine: EngineShape) -> Iterator[Problem]:
    """What an entry refers to must exist; a call that a trigger names must stand above it; a trigger must be able to fire."""
    limits: dict[str, int] = {}
    for entry in timeline:
        if isinstance(entry.operation, Submit):
            limits[entry.operation.id] = max(_most_output(entry.operation, engine), limits.get(entry.operation.id, 0))
    submitted: set[str] = set()
    names: dict[str, TimelineEntry] = {}
    for index, entry in enumerate(timeline):
        place: Place = ("timeline", index)
        if isinstance(entry.operation, Abort) and entry.operation.ids != "all":
            for number, request in enumerate(entry.operation.ids):
                yield from _unless_submitted(request, limits, (*place, "abort", "ids", number))
        if entry.when is not None:
            yield from _impossible_trigger(entry.when, limits, names, (*place, "when"))
            if entry.when.state == "blocked" and engine.late_requests != "block":
                yield Problem((*place, "when", "state"), f"got blocked under late_requests {engine.late_requests}; expected another state")
        if isinstance(entry.operation, Submit):
            if entry.when is not None and entry.when.request == entry.operation.id and entry.operation.id not in submitted:
                yield Problem((*place, "when", "request"), f"got {entry.operation.id!r}, which this very entry submits; expected another")
            submitted.add(entry.operation.id)
        if entry.name is not None and isinstance(entry.operation, DRIVER_VERBS):
            yield Problem((*place, "as"), f"got a name for `{entry.operation.verb}`, which is no call; expected none")
        elif entry.name in names:
            yield Problem((*place, "as"), f"got {entry.name!r}, the name of an entry above; expected one of its own")
        elif entry.name is not None:
            names[entry.name] = entry


def _most_output(submit: Submit, engine: EngineShape) -> int:
    """Tokens that a request can generate: max_tokens, or what a prompt of known length leaves of max_model_len."""
    prompt = submit.prompt.token_ids
    return submit.max_tokens if prompt is None else min(submit.max_tokens, max(engine.max_model_len - len(prompt), 0))


ROLLOUT_ID = re.compile(r"p[0-9]+\.")
"""How the ids of a workload's requests begin."""

TRAINER_VERBS = (
    "pause",
    "resume",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
    "swap_weights",
    "update_weight_version",
    "sleep",
    "wake_up",
)


def _unsimulated(form: _ScenarioForm) -> Iterator[Problem]:
    """What needs a workload, and what must not stand beside one."""
    if form.workload is None:
        if "timeline" not in form.model_fields_set:
            yield Problem(("timeline",), "got nothing; it is required, unless there is a `workload`")
        if form.latency.roofline is not None:
            yield Problem(("latency", "roofline"), "got no `workload`; expected `step_ms`: a timeline alone runs in steps of one length")
        return
    for index, entry in enumerate(form.timeline):
        operation, place = entry.operation, ("timeline", index)
        if isinstance(operation, Submit) and ROLLOUT_ID.match(operation.id):
            yield Problem((*place, "submit", "id"), f"got {operation.id!r}, a name for rollouts; expected another beside a workload")
        if isinstance(operation, DRIVER_VERBS):
            yield Problem(place, f"got `{operation.verb}`; expected none beside a workload: delay the entry after it by `when`")
        if form.workload.trainer is not None and operation.verb in TRAINER_VERBS:
            yield Problem(place, f"got `{operation.verb}`; expected none beside a workload whose trainer pauses and updates")


def _impossible_trigger(when: When, limits: Mapping[str, int], names: Mapping[str, TimelineEntry], place: Place) -> Iterator[Problem]:
    if when.request is not None:
        yield from _unless_submitted(when.request, limits, (*place, "request"))
        limit = limits.get(when.request)
        if when.tokens is not None and limit is not None and when.tokens > limit:
            yield Problem((*place, "tokens"), f"got {when.tokens}; expected at most {limit}, all that {when.request} can generate")
    for key, name in (("returned", when.returned), ("called", when.called)):
        if name is not None and name not in names:
            expected = ", ".join(names) or "but none has a name"
            yield Problem((*place, key), f"got {name!r}{suggestion(name, names)} expected the `as` of an entry above: {expected}")


def _unless_submitted(request: str, limits: Mapping[str, int], place: Place) -> Iterator[Problem]:
    if request not in limits:
        submitted = ", ".join(limits) or "but none is"
        yield Problem(place, f"got {request!r}{suggestion(request, limits)} expected a request that the file submits: {submitted}")


def dump(scenario: Scenario) -> str:
    """The scenario as a file: `load_scenario` reads back an equal one. Each entry takes one line."""
    lines = [f"schema: {SCHEMA}", _yaml({"name": scenario.name}, flow=False)]
    lines += _section("needs", scenario.needs) + _section("engine", scenario.engine) + _section("latency", scenario.latency)
    lines += [_yaml({"bound_ms": scenario.bound_ms}, flow=False)] if scenario.bound_ms != BOUND_MS else []
    lines += _section("workload", scenario.workload) if scenario.workload is not None else []
    lines += ["timeline:", *map(_entry_line, scenario.timeline)] if scenario.timeline else ["timeline: []"]
    lines += _section("expect", scenario.expect)
    lines += [_yaml({"fault": scenario.fault}, flow=False)] if scenario.fault is not None else []
    return "\n".join(lines) + "\n"


def _section(name: str, content: Data) -> list[str]:
    data = _plain(content)
    return [f"{name}: {_flow(data)}"] if data else []


def _plain(content: Data) -> dict[str, Any]:
    return content.model_dump(mode="json", exclude_defaults=True)


def _entry_line(entry: TimelineEntry) -> str:
    verb, arguments = next(iter(to_data(entry.operation).items()))
    if entry.when is None and entry.name is None:
        return f"  - {verb}: {_flow(arguments)}"
    when = {} if entry.when is None else {"when": _plain(entry.when)}
    name = {} if entry.name is None else {"as": entry.name}
    return f"  - {_flow({**when, verb: arguments, **name})}"


def _flow(value: Mapping[str, Any]) -> str:
    return _yaml(value, flow=True)


def _yaml(value: Mapping[str, Any], *, flow: bool) -> str:
    return yaml.dump(value, Dumper=_OneLine, default_flow_style=flow, sort_keys=False, allow_unicode=True, width=math.inf).rstrip("\n")


class _OneLine(yaml.SafeDumper):
    """Quotes text with line breaks so that they are escaped: PyYAML would fold them, and take U+0085 for a space."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style='"' if len(f"{data}.".splitlines()) > 1 else None)


_OneLine.add_representer(str, _OneLine.represent_str)


def schema_text() -> str:
    """The JSON Schema (2020-12) of scenario files, for editors: what docs/scenario.schema.json holds."""
    schema = _ScenarioForm.model_json_schema(by_alias=True)
    dialect = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
    return json.dumps({**dialect, **_without_null_defaults(schema), "title": "Caesura scenario"}, indent=2) + "\n"


def _without_null_defaults(node: Any) -> Any:
    """None stands for a field that is absent, which a schema says by not requiring it."""
    if isinstance(node, list):
        return [_without_null_defaults(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {key: _without_null_defaults(value) for key, value in node.items() if not (key == "default" and value is None)}
