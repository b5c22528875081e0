"""A scenario file as text: YAML whose every node keeps its line, so that an error points at what it is about.

Checking is pydantic's; this module turns what pydantic says about a value into what a person
needs to hear about a file: `file:line: field: what was got; what is expected`.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from yaml.reader import ReaderError

from harness.errors import BadInput

Place = tuple[str | int, ...]
"""Where in the document: mapping keys and list indices from the root."""

Form = TypeVar("Form", bound=BaseModel)


class ScenarioError(BadInput):
    """A scenario that cannot be used; `problems` has one line for each reason."""

    def __init__(self, *problems: str) -> None:
        super().__init__(*problems)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(self.problems)


class Problem(NamedTuple):
    """What is wrong at a place: what was got; what is expected."""

    place: Place
    message: str

    def __str__(self) -> str:
        return f"{field_path(self.place)}: {self.message}" if self.place else self.message


class Located(NamedTuple):
    """A pydantic location found in the document."""

    place: Place
    line: int
    through_union: bool
    """Pydantic names the members of a union it tried; the document does not."""


@dataclass(frozen=True)
class Source:
    """One parsed YAML document and where it came from."""

    path: Path
    text: str
    digest: str
    """SHA-256 of the file's bytes, hexadecimal."""
    root: yaml.Node
    data: Any

    @classmethod
    def read(cls, path: Path) -> Source:
        """Read and parse `path`.

        Raises:
            ScenarioError: unreadable, not UTF-8, not one YAML document, or a mapping with duplicate keys.
        """
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise ScenarioError(f"{path}: cannot be read ({error.strerror}); expected a scenario file") from error
        text = _decode(raw, path)
        root, data = _parse(text, path)
        return cls(path, text, hashlib.sha256(raw).hexdigest(), root, data)

    def line(self, place: Place) -> int:
        return self._locate(place).line

    def error(self, problems: Iterable[Problem]) -> ScenarioError:
        """The problems as one error, in the order of their lines."""
        located = sorted((self.line(problem.place), str(problem)) for problem in problems)
        return ScenarioError(*(f"{self.path}:{line}: {text}" for line, text in located))

    def validate(self, form: type[Form]) -> Form:
        """The document as a `form`.

        Raises:
            ScenarioError: with every problem that pydantic found.
        """
        try:
            return form.model_validate(self.data)
        except ValidationError as error:
            raise self.error(self._problems(error.errors(include_url=False), form)) from None

    def _problems(self, errors: Sequence[ErrorDetails], form: type[BaseModel]) -> Iterator[Problem]:
        """One problem for each place; the members of a union that do not fit are told together."""
        located = [(self._locate(error["loc"], missing=error["type"] == "missing"), error) for error in errors]
        unfit: dict[Place, tuple[Any, list[str]]] = {}
        for found, error in located:
            deeper = any(len(other.place) > len(found.place) and other.place[: len(found.place)] == found.place for other, _ in located)
            if error["type"] == "none_required" or (found.through_union and deeper):
                continue  # another member of the union fits better: a file leaves out what is None
            if error["type"] == "extra_forbidden":
                yield Problem(found.place, _unknown_field(str(found.place[-1]), fields_at(form, found.place[:-1])))
            elif error["type"] == "missing":
                yield Problem(found.place, "got nothing; it is required")
            else:
                unfit.setdefault(found.place, (error["input"], []))[1].append(_expectation(error))
        for place, (got, (first, *others)) in unfit.items():
            yield Problem(place, " or ".join([f"got {_shown(got)}; {first}", *(other.removeprefix("expected ") for other in others)]))

    def _locate(self, loc: Place, *, missing: bool = False) -> Located:
        """Follow `loc` through the nodes, leaving out segments that name no node: the members of unions.

        With `missing`, the last segment is a field that should be there; its line is that of the mapping.
        """
        node, line, place, through_union = self.root, self.root.start_mark.line + 1, [], False
        for depth, segment in enumerate(loc):
            child = _child(node, segment)
            if child is not None:
                node, line = child
            elif not (missing and depth + 1 == len(loc)):
                through_union = True
                continue
            place.append(segment)
        return Located(tuple(place), line, through_union)


def field_path(place: Place) -> str:
    """`("timeline", 2, "pause", "mode")` as `timeline[2].pause.mode`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")


def suggestion(got: str, known: Iterable[str]) -> str:
    """What ends the "got" half of a message: `, did you mean ...?` if something near is known, else a semicolon."""
    near = difflib.get_close_matches(got, list(known), n=1)
    return f", did you mean `{near[0]}`?" if near else ";"


def fields_at(form: type[BaseModel], place: Place) -> list[str]:
    """The names of the fields that a mapping at `place` of a `form` may have, as a file spells them."""
    forms = [form]
    for segment in place:
        if isinstance(segment, str):
            fields = [field for form in forms for name, field in form.model_fields.items() if (field.alias or name) == segment]
            forms = [inner for field in fields for inner in _forms_in(field.annotation)]
    return [field.alias or name for form in forms for name, field in form.model_fields.items()]


def _forms_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _forms_in(argument)


def _decode(raw: bytes, path: Path) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise ScenarioError(f"{path}:{line}: got the byte 0x{raw[error.start]:02x}; expected text in UTF-8") from error


def _parse(text: str, path: Path) -> tuple[yaml.Node, Any]:
    """The root node, and the plain data that it stands for."""

    def error(line: int, message: str) -> ScenarioError:
        return ScenarioError(f"{path}:{line}: {message}")

    try:
        loader = yaml.SafeLoader(text)
        root = loader.get_single_node()
        if root is None:
            raise error(1, "got an empty file; expected a mapping with `schema`, `name` and `timeline`")
        if bad := list(_bad_nodes(root, loader)):
            raise ScenarioError(*(f"{path}:{node.start_mark.line + 1}: {message}" for node, message in bad))
        return root, loader.construct_document(root)
    except ReaderError as failure:
        line = text.count("\n", 0, failure.position) + 1
        raise error(line, f"got the character {failure.character!r}; expected printable text") from failure
    except yaml.MarkedYAMLError as failure:
        mark = failure.problem_mark or failure.context_mark
        message = f"got {failure.problem or failure.context}; expected YAML"
        if failure.problem == "but found another document":
            message = "got a second document; expected one scenario a file"
        raise error(mark.line + 1 if mark else 1, message) from failure
    except RecursionError:
        raise error(1, "got lists or mappings nested hundreds deep; expected a scenario") from None


def _bad_nodes(root: yaml.Node, loader: yaml.SafeLoader) -> Iterator[tuple[yaml.Node, str]]:
    """What PyYAML lets pass or reports without a place: duplicate keys, and scalars that do not fit their tag."""
    seen: set[int] = set()  # an alias makes a node appear twice, or within itself
    nodes = [root]
    while nodes:
        node = nodes.pop()
        if id(node) in seen or node.tag == "tag:yaml.org,2002:merge":
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            yield from _duplicate_keys(node)
            nodes += [child for pair in reversed(node.value) for child in reversed(pair)]
        elif isinstance(node, yaml.SequenceNode):
            nodes += reversed(node.value)
        else:
            try:
                loader.construct_object(node)
            except ValueError as error:
                yield node, f"got {node.value!r}, no valid {node.tag.rpartition(':')[2]} ({error}); expected it in quotes if it is text"


def _duplicate_keys(mapping: yaml.MappingNode) -> Iterator[tuple[yaml.Node, str]]:
    lines: dict[tuple[str, str], int] = {}
    for key, _ in mapping.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        if (first := lines.get((key.tag, key.value))) is not None:
            yield key, f"got the key {key.value!r} again, first in line {first}; expected it once in a mapping"
        lines.setdefault((key.tag, key.value), key.start_mark.line + 1)


def _child(node: yaml.Node, segment: str | int) -> tuple[yaml.Node, int] | None:
    """The node below, and the line that names it: a field's is its key's."""
    if isinstance(node, yaml.SequenceNode) and isinstance(segment, int) and segment < len(node.value):
        item = node.value[segment]
        return item, item.start_mark.line + 1
    if isinstance(node, yaml.MappingNode):
        for key, value in reversed(node.value):  # what a merge key (`<<`) brings in stands first, and loses
            if key.value == segment:
                return value, key.start_mark.line + 1
    return None


_EXPECTED: dict[str, Callable[[dict[str, Any]], str]] = {
    "greater_than": lambda bound: f"more than {bound['gt']:g}",
    "greater_than_equal": lambda bound: f"at least {bound['ge']:g}",
    "less_than": lambda bound: f"less than {bound['lt']:g}",
    "less_than_equal": lambda bound: f"at most {bound['le']:g}",
    "literal_error": lambda bound: bound["expected"],
    "string_pattern_mismatch": lambda bound: f"a name that matches {bound['pattern']}",
    "string_too_short": lambda bound: "some text",
    "string_too_long": lambda bound: f"at most {bound['max_length']} characters",
    "int_type": lambda bound: "a whole number",
    "int_from_float": lambda bound: "a whole number",
    "float_type": lambda bound: "a number",
    "bool_type": lambda bound: "true or false",
    "model_type": lambda bound: "a mapping",
    "tuple_type": lambda bound: "a list",
}
"""What pydantic's types of error expect, in the words of a YAML file."""


def _expectation(error: ErrorDetails) -> str:
    context = error.get("ctx", {})
    if error["type"] == "value_error":
        return str(context["error"])
    if error["type"] == "string_type":
        is_scalar = error["input"] is not None and not isinstance(error["input"], list | dict)
        return "expected text, in quotes" if is_scalar else "expected text"
    if (words := _EXPECTED.get(error["type"])) is not None:
        return f"expected {words(context)}"
    return error["msg"]


def _unknown_field(got: str, known: Sequence[str]) -> str:
    return f"unknown field{suggestion(got, known)} expected one of {', '.join(dict.fromkeys(known))}"


def _shown(value: Any) -> str:
    if value is None:
        return "nothing"
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
