"""Scenario files: operations on a timeline, the engine they are put to, and what is to come of it.

A file is checked when it is loaded: a field that does not exist, a trigger that can never
fire and a name that nobody has are errors with the line that they are in, so that what is
left for a run to find out is about engines. Fuzzing and shrinking write the same files.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import ConfigDict, Field, create_model, model_validator
from pydantic.json_schema import SkipJsonSchema

from harness.operations import OPERATIONS, Abort, Data, Handle, Milliseconds, Operation, Submit, to_data
from harness.scenario_source import Place, Problem, ScenarioError, Source, suggestion

SCHEMA = 1
"""Version of the format of scenario files. The loader refuses a newer one."""

Size = Annotated[int, Field(ge=1)]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$")]
Names = Annotated[tuple[Name, ...], Field(strict=False)]


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


class Latency(Data):
    """What things cost in virtual time."""

    step_ms: Milliseconds = 1


class Expect(Data):
    """What is to come of a run, besides that every invariant holds."""

    reaches: Names = ()
    """Situations, by name, that must come about; else the run proves nothing."""
    ends: Literal["drained", "paused", "out-of-service"] = "drained"
    violates: Names = ()
    """Invariants, by id: exactly these are violated."""


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
    needs: Needs = field(default_factory=Needs)
    latency: Latency = field(default_factory=Latency)
    expect: Expect = field(default_factory=Expect)
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
        if problems := list(_impossible(timeline)):
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

    schema_version: Literal[1] = Field(alias="schema")
    name: str = Field(min_length=1)
    needs: Needs = Needs()
    engine: EngineShape = EngineShape()
    latency: Latency = Latency()
    timeline: Annotated[tuple[_EntryForm, ...], Field(strict=False)]
    expect: Expect = Expect()


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
    if problems := list(_impossible(timeline)):
        raise source.error(problems)
    return Scenario(
        name=form.name,
        engine=form.engine,
        timeline=timeline,
        needs=form.needs,
        latency=form.latency,
        expect=form.expect,
        path=source.path,
        text=source.text,
        digest=source.digest,
    )


def _refuse_newer_schema(source: Source) -> None:
    """Before anything else: the rest of a newer file would only seem to be wrong."""
    version = source.data.get("schema") if isinstance(source.data, dict) else None
    if isinstance(version, int) and version > SCHEMA:
        raise source.error([Problem(("schema",), f"got {version}; expected {SCHEMA}: this file needs a newer Caesura")])


def _impossible(timeline: Sequence[TimelineEntry]) -> Iterator[Problem]:
    """What an entry refers to must exist; a call that a trigger names must stand above it."""
    limits: dict[str, int] = {}
    for entry in timeline:
        if isinstance(entry.operation, Submit):
            limits[entry.operation.id] = max(entry.operation.max_tokens, limits.get(entry.operation.id, 0))
    names: dict[str, TimelineEntry] = {}
    for index, entry in enumerate(timeline):
        place: Place = ("timeline", index)
        if isinstance(entry.operation, Abort) and entry.operation.ids != "all":
            for number, request in enumerate(entry.operation.ids):
                yield from _unless_submitted(request, limits, (*place, "abort", "ids", number))
        if entry.when is not None:
            yield from _impossible_trigger(entry.when, limits, names, (*place, "when"))
        if entry.name in names:
            yield Problem((*place, "as"), f"got {entry.name!r}, the name of an entry above; expected one of its own")
        elif entry.name is not None:
            names[entry.name] = entry


def _impossible_trigger(when: When, limits: Mapping[str, int], names: Mapping[str, TimelineEntry], place: Place) -> Iterator[Problem]:
    if when.request is not None:
        yield from _unless_submitted(when.request, limits, (*place, "request"))
        limit = limits.get(when.request)
        if when.tokens is not None and limit is not None and when.tokens > limit:
            yield Problem((*place, "tokens"), f"got {when.tokens}; expected at most {limit}, the max_tokens of {when.request}")
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
    lines += ["timeline:", *map(_entry_line, scenario.timeline)] if scenario.timeline else ["timeline: []"]
    lines += _section("expect", scenario.expect)
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
