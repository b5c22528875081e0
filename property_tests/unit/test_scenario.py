"""Scenario files: what loads, what is refused and in which words, and that the files in scenarios/modes reach what they name."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from harness.backends.sim import SimBackend
from harness.coverage import Situations
from harness.events import Closed, Entry, Event, Finished, Hit, Preempted, Resumed
from harness.execute import Lockstep
from harness.operations import DRIVER_VERBS, OPERATIONS, Abort, Operation, Pause, Prompt, Resume, Submit, from_data
from harness.scenario import (
    EngineShape,
    Expect,
    Latency,
    Needs,
    Scenario,
    ScenarioError,
    TimelineEntry,
    When,
    dump,
    load_scenario,
    schema_text,
)
from harness.trial import opened_event

ROOT = Path(__file__).parents[2]
MODES = sorted((ROOT / "scenarios" / "modes").glob("*.yaml"))
SCHEMA_FILE = ROOT / "docs" / "scenario.schema.json"
EDITOR = jsonschema.Draft202012Validator(json.loads(SCHEMA_FILE.read_text()))
"""What an editor knows of scenario files."""

HEAD = "schema: 1\nname: a test\ntimeline:\n"
SUBMIT = "  - submit: {id: r1, prompt: {tokens: 5}, max_tokens: 60}\n"


@pytest.fixture
def load(tmp_path: Path) -> Callable[[str | bytes], Scenario]:
    def load(content: str | bytes) -> Scenario:
        path = tmp_path / "x.yaml"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return load_scenario(path)

    return load


@pytest.fixture
def problems(load: Callable[[str | bytes], Scenario], tmp_path: Path) -> Callable[[str | bytes], list[str]]:
    """The lines of the error that a content is refused with, without the folder."""

    def problems(content: str | bytes) -> list[str]:
        with pytest.raises(ScenarioError) as refused:
            load(content)
        return str(refused.value).replace(f"{tmp_path}/", "").split("\n")

    return problems


# What loads


def test_a_scenario_has_its_operations_triggers_names_and_lines(load):
    text = (
        HEAD
        + SUBMIT
        + "  - {when: {request: r1, tokens: 10}, pause: {mode: keep}, as: p1}\n  - {when: {returned: p1, ms: 50}, resume: {}}\n"
    )
    scenario = load(text)
    assert scenario.timeline == (
        TimelineEntry(operation=Submit(id="r1", prompt=Prompt(tokens=5), max_tokens=60)),
        TimelineEntry(operation=Pause(mode="keep"), when=When(request="r1", tokens=10), name="p1"),
        TimelineEntry(operation=Resume(), when=When(returned="p1", ms=50)),
    )
    assert [entry.line for entry in scenario.timeline] == [4, 5, 6]
    assert (scenario.text, scenario.digest) == (text, hashlib.sha256(text.encode()).hexdigest())
    assert (scenario.engine, scenario.latency.step_ms, scenario.expect.ends) == (EngineShape(), 1, "drained")


def test_an_operation_without_arguments_may_stand_bare(load):
    bare, spelled = load(HEAD + "  - resume:\n"), load(HEAD + "  - resume: {}\n")
    assert bare == spelled
    assert bare.timeline[0].operation == Resume()


@pytest.mark.parametrize(
    "when",
    [
        "{step: 3}",
        "{ms: 2.5}",
        "{request: r1, tokens: 60}",
        "{request: r1, state: finished, ms: 1}",
        "{returned: p1}",
        "{called: p1, ms: 4}",
    ],
)
def test_every_form_of_trigger_loads_and_satisfies_the_published_schema(load, when):
    text = HEAD + SUBMIT + f"  - {{pause: {{}}, as: p1}}\n  - {{when: {when}, resume: {{}}}}\n"
    assert load(text).timeline[2].when is not None
    EDITOR.validate(yaml.safe_load(text))


def test_anchors_and_merge_keys_keep_the_lines_of_what_they_merge(load, problems):
    text = HEAD + "  - submit: &first {id: r1, prompt: {tokens: 5}}\n  - submit:\n      <<: *first\n      id: r2\n"
    assert [entry.operation.id for entry in load(text).timeline] == ["r1", "r2"]
    assert problems(text + "      max_tokens: many\n") == ["x.yaml:8: timeline[1].submit.max_tokens: got 'many'; expected a whole number"]


# What is refused


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "1: got an empty file; expected a mapping with `schema`, `name` and `timeline`"),
        ("# only a comment\n", "1: got an empty file; expected a mapping with `schema`, `name` and `timeline`"),
        ("- a list\n", "1: got ['a list']; expected a mapping"),
        ("schema: 1\nname: [1,\n", "3: got expected the node content, but found '<stream end>'; expected YAML"),
        ("schema: 1\n---\nschema: 1\n", "2: got a second document; expected one scenario a file"),
        ("schema: 1\nname: a\nname: b\n", "3: got the key 'name' again, first in line 2; expected it once in a mapping"),
        (b"schema: 1\nname: \xff\n", "2: got the byte 0xff; expected text in UTF-8"),
        ("schema: 1\nname: \x07\n", "2: got the character 7; expected printable text"),
        ("schema: 1\nname: 2026-13-45\n", "2: got '2026-13-45', no valid timestamp (month must be in 1..12"),
        ("schema: 1\n? [a]\n: b\n", "2: got found unhashable key; expected YAML"),
        ("schema: 1\nname: " + "[" * 500, "1: got lists or mappings nested hundreds deep; expected a scenario"),
        ("schema: 2\nfuture: field\n", "1: schema: got 2; expected 1: this file needs a newer Caesura"),
        ("schema: 0\nname: a\ntimeline: []\n", "1: schema: got 0; expected 1"),
        ("name: a\ntimeline: []\n", "1: schema: got nothing; it is required"),
        ("schema: 1\nname: off\ntimeline: []\n", "2: name: got false; expected text, in quotes"),
        ("schema: 1\nname: a\ntimeline: {}\n", "3: timeline: got {}; expected a list"),
    ],
)
def test_a_file_that_is_no_scenario_is_refused_with_its_line(problems, content, expected):
    assert problems(content)[0].startswith(f"x.yaml:{expected}")


def test_a_file_that_cannot_be_read_is_refused_like_any_other(tmp_path):
    with pytest.raises(ScenarioError, match=r"none\.yaml: cannot be read \(No such file or directory\); expected a scenario file"):
        load_scenario(tmp_path / "none.yaml")


WRONG_ENTRIES = [
    ("{pause: {mode: kep}}", ".pause.mode: got 'kep'; expected 'abort', 'wait' or 'keep'"),
    ("{pause: {mod: keep}}", ".pause.mod: unknown field, did you mean `mode`? expected one of mode, clear_cache"),
    ("{paus: {}}", ".paus: unknown field, did you mean `pause`? expected one of submit, abort, step, advance, pause, resume"),
    ("{frobnicate: {}}", ".frobnicate: unknown field; expected one of submit, abort, step, advance, pause, resume"),
    ("resume", ": got 'resume'; expected a mapping"),
    ("{pause: {}, resume: {}}", ": got {'pause': {}, 'resume': {}}; expected exactly one operation of submit"),
    ("{as: p1}", ": got {'as': 'p1'}; expected exactly one operation of submit"),
    ("{submit: }", ".submit.id: got nothing; it is required"),
    ("{abort: {ids: r1}}", ".abort.ids: got 'r1'; expected a list or 'all'"),
    ("{abort: {ids: [1]}}", ".abort.ids[0]: got 1; expected text, in quotes"),
    ("{submit: {id: r 2, prompt: {tokens: 3}}}", ".submit.id: got 'r 2'; expected a name that matches ^[A-Za-z0-9_.:-]+$"),
    ("{submit: {id: r2, prompt: {tokens: [1, -2]}}}", ".submit.prompt.tokens[1]: got -2; expected at least 0"),
    ("{swap_weights: {source: {perturb: {seed: 1}}}}", ".swap_weights.source.perturb.scale: got nothing; it is required"),
    ("{when: {}, resume: }", ".when: got {}; expected exactly one of {step: N}, {ms: T}, "),
    ("{when: {request: r1}, resume: }", ".when: got {'request': 'r1'}; expected exactly one of {step: N}"),
    ("{when: {tokens: 3}, resume: }", ".when: got {'tokens': 3}; expected exactly one of {step: N}"),
    ("{when: {step: 1, called: p0}, resume: }", ".when: got {'step': 1, 'called': 'p0'}; expected exactly one of {step: N}"),
    ("{when: {step: 1, request: r1}, resume: }", ".when: got {'step': 1, 'request': 'r1'}; expected exactly one of {step: N}"),
    (
        "{when: {request: r1, state: asleep}, resume: }",
        ".when.state: got 'asleep'; expected 'accepted', 'blocked', 'running', 'preempted' or",
    ),
    ("{when: {request: r1, token: 3}, resume: }", ".when.token: unknown field, did you mean `tokens`? expected one of step"),
]
WRONG_BEYOND_JSON_SCHEMA = [
    ("{submit: {id: r2, prompt: {seed: 3}}}", ".submit.prompt: got {'seed': 3}; a prompt needs `text` or `tokens`"),
    (
        "{update_weights: {source: {original: true}, part: 3, of: 2}}",
        ".update_weights: got {'source': {'original': True}, 'part': 3, 'of': 2}; part 3",
    ),
]
"""What one field says about another, within an operation."""


@pytest.mark.parametrize(("entry", "expected"), WRONG_ENTRIES + WRONG_BEYOND_JSON_SCHEMA)
def test_an_entry_that_is_wrong_is_refused_with_its_line_and_field(problems, entry, expected):
    refusals = problems(HEAD + SUBMIT + f"  - {entry}\n")
    assert [line for line in refusals if line.startswith(f"x.yaml:5: timeline[1]{expected}")], refusals
    assert all(line.startswith("x.yaml:5: timeline[1]") for line in refusals)


@pytest.mark.parametrize("entry", [entry for entry, _ in WRONG_ENTRIES])
def test_an_editor_sees_what_the_loader_refuses(entry):
    assert not EDITOR.is_valid(yaml.safe_load(HEAD + SUBMIT + f"  - {entry}\n"))


def test_all_problems_of_a_file_are_told_at_once_in_the_order_of_its_lines(problems):
    text = "schema: 1\nengine: {block_sise: 4, num_blocks: 0}\nneeds: {level: 4}\ntimeline:\n  - pause: {mode: keep, clear_cache: maybe}\n"
    assert [line.partition(";")[0].partition(",")[0] for line in problems(text)] == [
        "x.yaml:1: name: got nothing",
        "x.yaml:2: engine.block_sise: unknown field",
        "x.yaml:2: engine.num_blocks: got 0",
        "x.yaml:3: needs.level: got 4",
        "x.yaml:5: timeline[0].pause.clear_cache: got 'maybe'",
    ]


@pytest.mark.parametrize("size", ["block_size", "num_blocks", "max_model_len", "max_num_seqs", "max_num_batched_tokens"])
def test_an_engine_without_a_size_is_refused(size):
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        EngineShape.model_validate({size: 0})


def test_an_engine_that_cannot_give_every_running_request_a_token_is_refused(problems):
    [problem] = problems("schema: 1\nname: a\nengine: {max_num_seqs: 8, max_num_batched_tokens: 4}\ntimeline: []\n")
    assert problem.startswith("x.yaml:3: engine: got")
    assert problem.endswith(
        "max_num_batched_tokens 4 is less than max_num_seqs 8; "
        "expected at least one token a step for each running request: raise the one or lower the other"
    )


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        (["{abort: {ids: [r1, r9]}}"], "5: timeline[1].abort.ids[1]: got 'r9'; expected a request that the file submits: r1"),
        (
            ["{when: {request: q, tokens: 3}, resume: }"],
            "5: timeline[1].when.request: got 'q'; expected a request that the file submits: r1",
        ),
        (
            ["{when: {request: r1, tokens: 61}, resume: }"],
            "5: timeline[1].when.tokens: got 61; expected at most 60, all that r1 can generate",
        ),
        (
            ["{when: {returned: p1}, resume: }"],
            "5: timeline[1].when.returned: got 'p1'; expected the `as` of an entry above: but none has a name",
        ),
        (
            ["{when: {called: p1}, pause: , as: p1}"],
            "5: timeline[1].when.called: got 'p1'; expected the `as` of an entry above: but none has",
        ),
        (
            ["{pause: , as: first}", "{when: {returned: fist}, resume: }", "{pause: , as: fist}"],
            "6: timeline[2].when.returned: got 'fist', did you mean `first`? expected the `as` of an entry above: first",
        ),
        (["{pause: , as: p1}", "{resume: , as: p1}"], "6: timeline[2].as: got 'p1', the name of an entry above; expected one of its own"),
    ],
)
def test_a_timeline_that_cannot_happen_is_refused(problems, entries, expected):
    [problem] = problems(HEAD + SUBMIT + "".join(f"  - {entry}\n" for entry in entries))
    assert problem.startswith(f"x.yaml:{expected}")


def test_a_situation_that_nobody_has_is_refused_with_the_near_one(problems):
    text = HEAD + SUBMIT + "expect: {reaches: [eviction, evictions]}\n"
    assert problems(text) == [
        "x.yaml:5: expect.reaches[1]: got 'evictions', did you mean `eviction`? expected a situation of docs/situations.md"
    ]
    assert not EDITOR.is_valid(yaml.safe_load(text))


def test_a_request_may_be_named_before_the_entry_that_submits_it(load):
    assert len(load(HEAD + "  - {when: {request: r1, tokens: 3}, resume: }\n" + SUBMIT).timeline) == 2


def test_operations_that_name_no_request_are_refused_as_in_a_file():
    with pytest.raises(
        ScenarioError, match=r"^timeline\[0\]\.abort\.ids\[0\]: got 'r1'; expected a request that the file submits: but none is$"
    ):
        Scenario.from_operations(EngineShape(), [Abort(ids=("r1",))])


# Writing files

IDS = ("r1", "r-2", "no", "1e3")
sizes = st.integers(1, 500)
salts = st.none() | st.text(min_size=1, max_size=8)
versions = st.none() | st.text(min_size=1, max_size=8)
prompts = st.one_of(
    st.builds(Prompt, text=st.text(max_size=30)),
    st.builds(Prompt, tokens=st.lists(st.integers(0, 999), max_size=8).map(tuple)),
    st.builds(
        lambda data: Prompt.model_validate(data),
        st.fixed_dictionaries({"tokens": sizes, "seed": sizes, "prefix": st.just({"tokens": 4, "seed": 2})}),
    ),
)
sources = st.one_of(
    st.just({"original": True}),
    st.fixed_dictionaries({"checkpoint": st.text(min_size=1, max_size=8)}),
    st.fixed_dictionaries({"perturb": st.fixed_dictionaries({"seed": sizes, "scale": st.floats(1e-9, 1e9)})}),
)
submits = st.builds(Submit, id=st.sampled_from(IDS), prompt=prompts, max_tokens=sizes, cache_salt=salts, ignore_eos=st.booleans())
controls = st.one_of(
    st.builds(Abort, ids=st.just("all") | st.lists(st.sampled_from(IDS), max_size=3).map(tuple)),
    st.sampled_from(["step", "resume", "is_paused", "reset_prefix_cache"]).map(lambda verb: from_data({verb: {}})),
    st.fixed_dictionaries({"advance": st.fixed_dictionaries({"steps": sizes}) | st.fixed_dictionaries({"ms": st.floats(1e-6, 8e7)})}).map(
        from_data
    ),
    st.builds(Pause, mode=st.sampled_from(["abort", "wait", "keep"]), clear_cache=st.booleans()),
    st.fixed_dictionaries({"start_weight_update": st.fixed_dictionaries({"allow_unpaused": st.booleans(), "fails": st.booleans()})}).map(
        from_data
    ),
    st.fixed_dictionaries({"update_weights": st.fixed_dictionaries({"source": sources, "part": st.integers(1, 3), "of": st.just(3)})}).map(
        from_data
    ),
    st.fixed_dictionaries({"finish_weight_update": st.fixed_dictionaries({"version": versions, "fails": st.booleans()})}).map(from_data),
    st.fixed_dictionaries({"swap_weights": st.fixed_dictionaries({"source": sources, "version": versions})}).map(from_data),
    st.fixed_dictionaries({"update_weight_version": st.fixed_dictionaries({"version": st.text(min_size=1, max_size=8)})}).map(from_data),
)
shapes = st.builds(
    EngineShape,
    checkpoint=st.text(min_size=1, max_size=12),
    num_blocks=sizes,
    max_num_batched_tokens=st.integers(8, 99),
    prefix_caching=st.booleans(),
    late_requests=st.sampled_from(["queue", "reject", "block"]),
)


@st.composite
def timelines(draw: st.DrawFn) -> tuple[TimelineEntry, ...]:
    """Timelines that can happen: every id is submitted, triggers name calls above, and no request waits for itself."""
    first = [draw(submits).model_copy(update={"id": request}) for request in IDS]
    operations: list[Operation] = [*first, *draw(st.lists(submits | controls, max_size=8))]
    entries: list[TimelineEntry] = []
    for index, operation in enumerate(operations):
        above = [entry.name for entry in entries if entry.name]
        requests = st.sampled_from([request for request in IDS if index >= len(IDS) or request != IDS[index]])
        triggers = [
            st.none(),
            st.builds(When, step=sizes, ms=st.none() | st.floats(1e-6, 8e7)),
            st.builds(When, ms=st.floats(1e-6, 8e7)),
            st.builds(When, request=requests, tokens=st.just(1)),
            st.builds(When, request=requests, state=st.sampled_from(["accepted", "preempted"])),
            *([st.builds(When, returned=st.sampled_from(above)), st.builds(When, called=st.sampled_from(above))] if above else []),
        ]
        name = None if isinstance(operation, DRIVER_VERBS) else draw(st.none() | st.just(f"c{index}"))
        entries.append(TimelineEntry(operation=operation, when=draw(st.one_of(triggers)), name=name))
    return tuple(entries)


scenarios = st.builds(
    Scenario,
    name=st.text(min_size=1, max_size=20),
    engine=shapes,
    timeline=timelines(),
    needs=st.builds(Needs, level=st.integers(0, 3)),
    latency=st.builds(Latency, step_ms=st.floats(0.001, 1000)),
    expect=st.builds(Expect, reaches=st.just(("token-over-stale-kv",)) | st.just(()), ends=st.sampled_from(["drained", "paused"])),
)


@settings(max_examples=25, deadline=None)
@given(scenario=scenarios)
def test_what_is_written_is_read_back_equal_and_satisfies_the_published_schema(tmp_path_factory, scenario):
    path = tmp_path_factory.getbasetemp() / "written.yaml"
    written = dump(scenario)
    path.write_text(written, encoding="utf-8", newline="")
    assert load_scenario(path) == scenario
    assert written.count("\n  - ") == len(scenario.timeline)
    EDITOR.validate(yaml.safe_load(written))


@pytest.mark.parametrize("text", ["a\nb", "a\r", "\u0085b", "ü\u0085", "a\u2028b", "\x0b", "\t", " ", "yes", "1e3", "#", "ü \U0001f30a"])
def test_text_of_every_kind_is_written_on_one_line_and_read_back(load, text):
    scenario = Scenario.from_operations(EngineShape(), [Submit(id="r1", prompt=Prompt(text=text))], name=text)
    assert load(dump(scenario)) == scenario
    assert len(dump(scenario).splitlines()) == 4


def test_operations_are_written_one_a_line_in_order(tmp_path):
    operations = [Submit(id="r1", prompt=Prompt(tokens=5)), Pause(mode="keep"), Abort(ids=("r1",)), Resume()]
    scenario = Scenario.from_operations(EngineShape(num_blocks=8), operations, name="shrunk")
    assert dump(scenario).splitlines() == [
        "schema: 1",
        "name: shrunk",
        "engine: {num_blocks: 8}",
        "timeline:",
        "  - submit: {id: r1, prompt: {tokens: 5}}",
        "  - pause: {mode: keep}",
        "  - abort: {ids: [r1]}",
        "  - resume: {}",
    ]
    assert (scenario.path, scenario.text, scenario.digest) == (None, "", "")


def test_scenarios_are_equal_by_what_they_do_and_not_by_their_file(load, tmp_path):
    scenario = load(HEAD + SUBMIT)
    assert scenario == load("# a comment moves every line\n" + HEAD + SUBMIT)
    assert scenario != load(HEAD + SUBMIT + "  - resume:\n")


# The files of this repository


def test_the_published_schema_is_current():
    command = "python -c \"from harness.scenario import schema_text; print(schema_text(), end='')\" > docs/scenario.schema.json"
    assert SCHEMA_FILE.read_text() == schema_text(), f"write it anew: {command}"
    jsonschema.Draft202012Validator.check_schema(json.loads(schema_text()))


@pytest.mark.parametrize("path", MODES, ids=lambda path: path.stem)
def test_mode_scenarios_satisfy_the_published_schema_and_say_what_they_show(path):
    scenario = load_scenario(path)
    EDITOR.validate(yaml.safe_load(scenario.text))
    assert scenario.text.startswith("# ")
    assert load_scenario(path) == scenario


def test_mode_scenarios_use_every_operation_of_an_engine():
    used = {entry.operation.verb for path in MODES for entry in load_scenario(path).timeline}
    assert used >= set(OPERATIONS) - {"step", "advance"}


def run_on_model(scenario: Scenario) -> list[Entry]:
    backend, entries = SimBackend(), []
    info = backend.start(scenario.engine)
    Lockstep(scenario, backend, [entries.extend]).run(opened_event(scenario.engine, backend, info, digest=scenario.digest, seed=0))
    return entries


def finished(events: Sequence[Event], request: str) -> Finished:
    return next(event for event in events if isinstance(event, Finished) and event.request == request)


def versions_of(events: Sequence[Event], request: str) -> list[str]:
    return [span.version for span in finished(events, request).spans]


def hits(events: Sequence[Event]) -> list[str]:
    return [event.request for event in events if isinstance(event, Hit)]


def lost_to_pressure(events: Sequence[Event]) -> tuple[int, int]:
    """How often a request lost its blocks to another one, before the first resume and after it."""
    resumed = next(index for index, event in enumerate(events) if isinstance(event, Resumed))
    before, after = (
        sum(isinstance(event, Preempted) and event.by is not None for event in part) for part in (events[:resumed], events[resumed:])
    )
    return before, after


SHOWN: dict[str, Callable[[Sequence[Event]], bool]] = {
    "keep_clear_new_weights": lambda events: all(versions_of(events, r) == ["default", "v2"] for r in ("sea", "moon", "bread", "colours")),
    "there_and_back": lambda events: versions_of(events, "r1") == ["A", "B", "A"],
    "three_epochs_one_context": lambda events: versions_of(events, "r1") == ["default", "v1", "v2", "v3"],
    "abort_new_weights": lambda events: finished(events, "r3").output_tokens == 0 < finished(events, "r1").output_tokens < 20,
    "wait_new_weights": lambda events: versions_of(events, "r3") == ["default"] and versions_of(events, "r4") == ["v2"],
    "wait_for_every_state": lambda events: versions_of(events, "r5") == ["default"] and versions_of(events, "late") == ["v2"],
    "keep_clear_small_pool": lambda events: min(lost_to_pressure(events)) > 0,
    "keep_stale_small_pool": lambda events: min(lost_to_pressure(events)) > 0,
    "late_requests_reject": lambda events: finished(events, "late1").reason == "length",
    "shared_prefix_over_update": lambda events: hits(events) == ["r2", "r4"],
    "shared_prefix_over_clear": lambda events: hits(events) == ["r2", "r2"],
}
"""What a file is to show beyond the situations that it names: who exactly, and under which versions."""


@pytest.mark.parametrize("path", MODES, ids=lambda path: path.stem)
def test_mode_scenarios_fire_every_entry_end_as_expected_and_reach_what_they_name(path):
    scenario = load_scenario(path)
    entries = run_on_model(scenario)
    closed = entries[-1].event
    assert isinstance(closed, Closed)
    assert (closed.why, closed.unfired) == (scenario.expect.ends, ())
    situations = Situations()
    situations.feed(entries)
    assert scenario.expect.reaches
    assert not [name for name in scenario.expect.reaches if name not in situations.counts]
    if path.stem in SHOWN:
        assert SHOWN[path.stem]([entry.event for entry in entries])


def test_what_a_file_is_to_show_belongs_to_a_file():
    assert SHOWN.keys() <= {path.stem for path in MODES}
