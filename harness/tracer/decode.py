"""Tokens of a tracer checkpoint -> the weights that sampled them, the share of stale KV they saw, breaks of the position chain.

The checkpoint (checkpoint.py) and this decoder share one `CodeBook`, which every version's folder holds as `tracer.json`.
This module needs no torch: tokens that came over HTTP are read on any machine.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec

from harness.events import VersionSpan

FILE = "tracer.json"
"""The file in a checkpoint's folder that makes it a tracer."""

UNTRACED = "untraced"
"""The version of an output token that no head emits: one of the prompt's tokens."""

DType = Literal["float32", "bfloat16"]
T = TypeVar("T")


class NotATracer(ValueError):
    """A folder that is no tracer checkpoint, or one that this decoder does not understand."""


class Share(NamedTuple):
    """The share of stale KV entries that a token attended to: those which another version than the sampling one had written.

    The true share lies in [low, high], the rounding of the checkpoint's dtype included; no share at all (0, 0) and nothing
    but stale entries (1, 1) are exact.
    """

    level: int
    """Its place in the code book, from 0 (nothing stale) up."""

    nearest: float
    """The multiple of one share, a sixteenth for example, that the level stands for."""

    low: float
    high: float

    @property
    def is_fresh(self) -> bool:
        """Not one stale entry."""
        return self.high == 0.0

    @property
    def is_torn(self) -> bool:
        """Not one fresh entry, not even the one that this very step wrote: its attention weights and its head are of two versions."""
        return self.low == 1.0

    def holds(self, share: float) -> bool:
        """Whether a true share of `share` may decode to this level."""
        return self.low <= share <= self.high


class Break(NamedTuple):
    """The position chain breaks at output index `index`: that token names position `got` where `expected` had to come.

    lost: `count` tokens are missing before it. doubled: the last `count` output tokens come again. shifted: it lies `count`
    positions behind, further than output goes back: the token was sampled at a wrong place, not delivered twice. foreign:
    no head emits this token, so it was not sampled (`count` is 0). Positions and counts are modulo the code book's period;
    a jump ahead of more than half a period reads as one behind.
    """

    index: int
    kind: Literal["lost", "doubled", "shifted", "foreign"]
    expected: int
    got: int
    count: int


class Mislabel(NamedTuple):
    """Output tokens [start, end) that an engine says came from `claimed` came from `traced`.

    `claimed` is None for tokens in none of the engine's spans, `traced` is None where a span reaches beyond the output.
    """

    start: int
    end: int
    claimed: str | None
    traced: str | None


class Trace(NamedTuple):
    """What a request's output tokens tell; the tuples but `breaks` have one entry for each of them."""

    versions: tuple[str, ...]
    """The version whose head sampled the token: `v1`, `v2`, ... or `UNTRACED`."""

    shares: tuple[Share | None, ...]
    """The stale share among the KV entries it attended to; None for an untraced token."""

    breaks: tuple[Break, ...]

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """The version spans that an honest engine reports: half-open, a partition of the output."""
        return tuple(VersionSpan(version, start, end) for version, start, end in _runs(list(enumerate(self.versions))))

    @property
    def stale(self) -> tuple[int, ...]:
        """Output indices of the tokens that attended to at least one stale entry."""
        return tuple(index for index, share in enumerate(self.shares) if share is not None and not share.is_fresh)

    def mislabelled(self, spans: Iterable[tuple[str, int, int]], names: Mapping[str, str] | None = None) -> tuple[Mislabel, ...]:
        """Where an engine's version spans are wrong; empty if each token has one label, the right one.

        `spans` are (label, start, end) over the output. `names` maps the engine's labels to tracer versions, `{"default": "v1"}`
        for example; a label that it lacks is taken to be the version's name.
        """
        names = names or {}
        wrong: list[tuple[int, tuple[str | None, str | None]]] = []
        covered: set[int] = set()
        for label, start, end in spans:
            for index in range(start, end):
                traced = self.versions[index] if 0 <= index < len(self.versions) else None
                if traced != names.get(label, label) or index in covered:
                    wrong.append((index, (label, traced)))
                covered.add(index)
        wrong += [(index, (None, traced)) for index, traced in enumerate(self.versions) if index not in covered]
        wrong.sort(key=lambda item: item[0])
        return tuple(Mislabel(start, end, *labels) for labels, start, end in _runs(wrong))


class CodeBook(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a token id means: either a token for prompts (colour, position) or a generated one (version, level, position).

    Ids count prompt tokens first, positions fastest. Positions are modulo `period`. Colours mean nothing: they let prompts
    differ that have the same positions. Levels are none, some (less than half a share), 1/shares, ..., (shares - 1)/shares,
    most (less than half a share is fresh), all. Raises ValueError for numbers that no checkpoint can be made from.
    """

    dtype: DType = "float32"
    versions: int = 8
    shares: int = 16
    period: int = 256
    colours: int = 16
    context: int = 4096
    """The longest sequence in which one stale entry is told from none."""

    def __post_init__(self) -> None:
        if not 2 <= self.versions <= 64:
            raise ValueError(f"a tracer has 2 to 64 versions, got {self.versions}")
        finest = {"float32": 32, "bfloat16": 16}[self.dtype]
        if not (_is_power_of_two(self.shares) and 8 <= self.shares <= finest):
            raise ValueError(f"shares must be 8, 16 or, in float32 alone, 32; got {self.shares} in {self.dtype}")
        if not (_is_power_of_two(self.period) and 16 <= self.period <= 65536):
            raise ValueError(f"the period must be a power of two from 16 to 65536 (a bit of the embedding each), got {self.period}")
        if not 1 <= self.colours <= 256:
            raise ValueError(f"a tracer has 1 to 256 colours of prompt tokens, got {self.colours}")
        if not (_is_power_of_two(self.context) and self.shares < self.context <= 65536):
            raise ValueError(f"the context must be a power of two above {self.shares} shares and at most 65536, got {self.context}")

    @property
    def levels(self) -> int:
        return self.shares + 3

    @property
    def prompt_tokens(self) -> int:
        """Ids below this are prompt tokens: no head emits them."""
        return self.colours * self.period

    @property
    def vocabulary(self) -> int:
        return self.prompt_tokens + self.versions * self.levels * self.period

    @property
    def thresholds(self) -> tuple[float, ...]:
        """The shares between neighbouring levels, `levels - 1` of them.

        Half an entry of the longest context; the odd multiples of half a share; one less half an entry.
        """
        entry = 0.5 / self.context
        return (entry, *((2 * i + 1) / (2 * self.shares) for i in range(self.shares)), 1 - entry)

    @property
    def margin(self) -> float:
        """How far beyond a threshold a share may lie and still decode to the level before it; for none and all it is 0.

        float32: less than the distance, 1 / (2 shares context), of the nearest share that is not on a threshold itself, so
        exact. bfloat16: two logits may round to the same number if they differ by one unit in the last place, 1/240 of
        the lowest score that wins, shares^2 / 4 (checkpoint.UNIT), and a share's change moves their difference by
        2 shares times as much. 2^-8 more is for a unit in the last place in each of the two fractions that attention returns.
        """
        return 2.0**-20 if self.dtype == "float32" else self.shares / 1920 + 2.0**-8

    def version(self, token: int) -> str:
        """The version whose head emits `token`: `v1`, ..., or UNTRACED for a prompt token."""
        generated = self._known(token) - self.prompt_tokens
        return UNTRACED if generated < 0 else f"v{generated // (self.levels * self.period) + 1}"

    def share(self, token: int) -> Share | None:
        """The stale share that `token` reports; None for a prompt token."""
        generated = self._known(token) - self.prompt_tokens
        return None if generated < 0 else self._share_of_level(generated // self.period % self.levels)

    def position(self, token: int) -> int:
        """The position, modulo the period, that `token` stands for."""
        return self._known(token) % self.period

    def name(self, token: int) -> str:
        """How the tokenizer spells `token`: `p3:017` (colour, position) or `v2:5/16:017` (version, share, position)."""
        position = f"{self.position(token):0{len(str(self.period - 1))}}"
        if token < self.prompt_tokens:
            return f"p{token // self.period}:{position}"
        level = (token - self.prompt_tokens) // self.period % self.levels
        share = ("0", "0+", *(f"{i}/{self.shares}" for i in range(1, self.shares)), "1-", "1")[level]
        return f"{self.version(token)}:{share}:{position}"

    def _share_of_level(self, level: int) -> Share:
        if level == 0:
            return Share(level, 0.0, 0.0, 0.0)
        if level == self.levels - 1:
            return Share(level, 1.0, 1.0, 1.0)
        bounds = self.thresholds
        low = bounds[level - 1] - (self.margin if level > 1 else 0)
        high = bounds[level] + (self.margin if level < self.levels - 2 else 0)
        return Share(level, (level - 1) / self.shares, low, high)

    def _known(self, token: int) -> int:
        if not 0 <= token < self.vocabulary:
            raise ValueError(
                f"got token {token}, expected one of this tracer's vocabulary of {self.vocabulary}: decode with the folder that was served"
            )
        return token


class _File(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of tracer.json."""

    format: Literal["caesura-tracer-1"] = "caesura-tracer-1"
    version: str
    code_book: CodeBook


def write_file(folder: Path, code_book: CodeBook, version: str) -> None:
    """Mark `folder` as the checkpoint of one version of a tracer."""
    content = msgspec.json.encode(_File(version=version, code_book=code_book))
    (folder / FILE).write_bytes(msgspec.json.format(content, indent=2) + b"\n")


class Decoder:
    """Reads the tokens of one tracer, all its versions alike, and makes prompts for it."""

    def __init__(self, code_book: CodeBook) -> None:
        self.code_book = code_book

    @classmethod
    def from_folder(cls, folder: Path | str) -> Decoder:
        """The decoder for a tracer, from the checkpoint folder of any of its versions. Raises NotATracer."""
        file = Path(folder) / FILE
        try:
            content = msgspec.json.decode(file.read_bytes(), type=_File)
        except FileNotFoundError:
            raise NotATracer(
                f"{folder} is no tracer checkpoint: it has no {FILE}. Expected one version's folder, OUT/v1 for example,"
                " as `caesura checkpoint tracer OUT` makes it"
            ) from None
        except (ValueError, OSError) as error:
            raise NotATracer(f"{file} cannot be read as a tracer's code book: {error}. Make the checkpoint anew") from error
        return cls(content.code_book)

    def prompt(self, length: int, *, seed: int = 0, after: Sequence[int] = ()) -> tuple[int, ...]:
        """`length` prompt tokens with proper positions, in pseudo-random colours.

        Prompts of one seed share their beginning; those of two seeds differ early. `after` is what these tokens will follow,
        a shared prefix or an earlier turn: they continue its positions.
        """
        if length < 1:
            raise ValueError(f"a prompt needs 1 token or more, got {length}")
        book, stream = self.code_book, random.Random(seed)
        first = book.position(after[-1]) + 1 if after else int(stream.random() * book.period)
        return tuple(int(stream.random() * book.colours) * book.period + (first + i) % book.period for i in range(length))

    def decode(self, prompt: Sequence[int], output: Sequence[int]) -> Trace:
        """What `output` tells. Of `prompt` only the last token matters: the output's positions follow it.

        So prompts need no proper positions. To judge the chain within a prompt that holds earlier output, hand that part in
        as output. Raises ValueError for an empty prompt and for a token outside the vocabulary.
        """
        if not prompt:
            raise ValueError("got an empty prompt; the position chain begins with its last token")
        book = self.code_book
        return Trace(
            versions=tuple(book.version(token) for token in output),
            shares=tuple(book.share(token) for token in output),
            breaks=tuple(self._breaks(prompt[-1], output)),
        )

    def tokens(self, text: str) -> tuple[int, ...]:
        """The token ids of a text that the tracer's own tokenizer made, for an API that returns no ids. Raises ValueError."""
        try:
            return tuple(self._ids[word] for word in text.split())
        except KeyError as error:
            example = self.code_book.name(self.code_book.prompt_tokens)
            raise ValueError(f"got {error} in a text, expected what this tracer's tokenizer spells, {example!r} for example") from None

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {self.code_book.name(token): token for token in range(self.code_book.vocabulary)}

    def _breaks(self, last: int, output: Sequence[int]) -> Iterable[Break]:
        book = self.code_book
        for index, token in enumerate(output):
            expected, got = (book.position(last) + 1) % book.period, book.position(token)
            last = token
            ahead = (got - expected) % book.period
            behind = book.period - ahead
            if token < book.prompt_tokens:
                yield Break(index, "foreign", expected, got, 0)
            elif 0 < ahead <= book.period // 2:
                yield Break(index, "lost", expected, got, ahead)
            elif ahead:
                yield Break(index, "doubled" if behind <= index else "shifted", expected, got, behind)


def _is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _runs(items: Sequence[tuple[int, T]]) -> list[tuple[T, int, int]]:
    """Joins (index, value) pairs into half-open runs of consecutive indices with equal values."""
    runs: list[tuple[T, int, int]] = []
    for index, value in items:
        if runs and runs[-1][2] == index and runs[-1][0] == value:
            runs[-1] = (value, runs[-1][1], index + 1)
        else:
            runs.append((value, index, index + 1))
    return runs
