"""Makes cases: small engines, few requests, and everything that can be asked of them, in every order.

A case is a list of phrases, each a few operations that belong together: a burst of requests, a pause, a whole
weight update with its mishaps. Pools are so small that preemption, eviction and sharing happen all the time, and any phrase may
break into another. Half of the cases draw from all phrases, half from a random few with random weights ("swarm testing",
Groce et al., ISSTA 2012): what some operations hide is found where they are absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, get_args

from harness.events import Tag
from harness.fuzz.case import MOST_PARTS, Case, submitted
from harness.fuzz.draws import Draws, Stream, between, once_in, one_of
from harness.operations import (
    Abort,
    Advance,
    FinishWeightUpdate,
    IsPaused,
    IsSleeping,
    Level,
    Mode,
    Operation,
    Pause,
    Perturbation,
    Prompt,
    ResetPrefixCache,
    Resume,
    Sleep,
    Spoil,
    StartWeightUpdate,
    Step,
    Submit,
    SwapWeights,
    TokenRun,
    UpdateWeights,
    UpdateWeightVersion,
    WakeUp,
    WeightSource,
)
from harness.scenario import EngineShape

HANDLES = tuple(f"r{number}" for number in range(1, 7))
VERSIONS = ("v1", "v2", "v3")
SALTS = (None, None, None, None, None, None, "a", "b")
LONGEST = 40
"""Tokens of the longest request; where a pool has no room for as many, most requests are as short as it demands."""
MODES: tuple[Mode, ...] = ("keep", *get_args(Mode))
TAGS: tuple[tuple[Tag, ...] | None, ...] = (None, None, ("weights",), ("kv_cache",))
LEVELS: tuple[Level, ...] = get_args(Level)
HOWS = ("name", "shape", "nan", "infinity")
SOURCES = (WeightSource(original=True), *(WeightSource(perturb=Perturbation(seed=seed, scale=0.5)) for seed in range(3)))

PHRASES_LEAST, PHRASES_MOST = 4, 24
RARELY = 8
"""Once in so many times a call fails, a session is opened beside steps, or a phrase breaks into another."""


def generate(draws: Draws, *, seed: int = 0, engine: Mapping[str, Any] | None = None, verbs: frozenset[str] | None = None) -> Case:
    """One case.

    Args:
        seed: kept with the case; `sim` samples its tokens by it.
        engine: fields of the engine's shape that are not drawn but given.
        verbs: the operations that the engine knows; None: all, and then it has a host tier and refuses bad tensors, too.
    """
    shape = _shape(draws, engine or {}, host=verbs is None)
    writer = _Writer(draws, room=min(shape.max_model_len, shape.num_blocks * shape.block_size), spoils=verbs is None)
    phrases = _weights(draws)
    if not once_in(draws, RARELY):
        writer.burst()
    for _ in range(between(draws, PHRASES_LEAST, PHRASES_MOST)):
        writer.phrase(phrases)
    operations = writer.operations if verbs is None else [one for one in writer.operations if one.verb in verbs]
    return Case(engine=shape, operations=referring(operations), seed=seed)


def case_of(seed: int, *, engine: Mapping[str, Any] | None = None, verbs: frozenset[str] | None = None) -> Case:
    """The case of a seed: the same one everywhere and always."""
    return generate(Stream(seed), seed=seed, engine=engine, verbs=verbs)


def referring(operations: Sequence[Operation]) -> tuple[Operation, ...]:
    """The operations without what refers to nothing: a scenario may only abort ids that it submits somewhere."""
    known = submitted(operations)
    kept: list[Operation] = []
    for operation in operations:
        if isinstance(operation, Abort) and operation.ids != "all":
            ids = tuple(id for id in operation.ids if id in known)
            if not ids:
                continue
            if ids != operation.ids:
                operation = Abort(ids=ids)
        kept.append(operation)
    return tuple(kept)


def _shape(draws: Draws, given: Mapping[str, Any], *, host: bool) -> EngineShape:
    seqs = between(draws, 1, 4)
    drawn = {
        "checkpoint": "tiny",
        "block_size": between(draws, 2, 4),
        "num_blocks": between(draws, 4, 12),
        "max_model_len": between(draws, 12, LONGEST),
        "max_num_seqs": seqs,
        "max_num_batched_tokens": between(draws, 4, 16),
        "prefix_caching": not once_in(draws, 4),
        "long_prefill_token_threshold": 3 if once_in(draws, 3) else 0,
        "late_requests": one_of(draws, ("queue", "queue", "reject", "block")),
        "host_blocks": one_of(draws, (0, 0, 0, 2, 5, 12)) if host else 0,
    }
    return EngineShape.model_validate({**drawn, **given})


class _Writer:
    """Appends phrases to a list of operations."""

    def __init__(self, draws: Draws, *, room: int, spoils: bool) -> None:
        self.operations: list[Operation] = []
        self._draws = draws
        self._spoils = spoils
        """Whether a source may hold a bad tensor."""
        self._room = room
        """Tokens that a request may come to, prompt and output."""
        self._unused = list(HANDLES)
        self._prefixed = once_in(draws, 2)
        """Whether prompts share their beginnings."""

    def phrase(self, phrases: Sequence[Phrase]) -> None:
        one_of(self._draws, phrases)(self)

    # Phrases.

    def submit(self, *, longest: bool = False) -> None:
        """Mostly a new id; sometimes one that may be live, or may have ended. `longest`: with all the output that it has room for."""
        draws = self._draws
        unused = self._unused and not once_in(draws, 4)
        id = self._unused.pop(0) if unused else one_of(draws, HANDLES)
        room = LONGEST if once_in(draws, 2 * RARELY) else self._room
        prefix = (between(draws, 2, 9), draws.below(4) // 3) if self._prefixed or once_in(draws, 4) else None
        if prefix is not None and prefix[0] + 2 > room:
            prefix = None
        room -= prefix[0] if prefix else 0
        prompt = between(draws, 1, min(10, room - 1))
        max_tokens = room - prompt if longest else between(draws, 1, min(14, room - prompt))
        salt = one_of(draws, SALTS)
        self.operations.append(Submit(id=id, prompt=_prompt(prompt, draws.below(4), prefix), max_tokens=max_tokens, cache_salt=salt))

    def burst(self) -> None:
        for _ in range(between(self._draws, 2, 4)):
            self.submit()

    def steps(self) -> None:
        count = between(self._draws, 1, 6)
        self.operations.append(_STEP if count == 1 else _ADVANCES[count])

    def abort(self) -> None:
        ids = tuple(dict.fromkeys(one_of(self._draws, HANDLES) for _ in range(between(self._draws, 1, 3))))
        self._ask(Abort, ids=ids)

    def abort_all(self) -> None:
        self.operations.append(_ABORT_ALL)

    def pause(self) -> None:
        self._ask(Pause, mode=one_of(self._draws, MODES), clear_cache=once_in(self._draws, 2))

    def resume(self) -> None:
        self.operations.append(_RESUME)

    def is_paused(self) -> None:
        self.operations.append(_IS_PAUSED)

    def reset(self) -> None:
        self.operations.append(_RESET)

    def relabel(self) -> None:
        allow = once_in(self._draws, RARELY)
        self._ask(UpdateWeightVersion, version=one_of(self._draws, VERSIONS), allow_unpaused=allow)

    def start(self) -> None:
        allow, fails = once_in(self._draws, RARELY), once_in(self._draws, RARELY)
        self._ask(StartWeightUpdate, allow_unpaused=allow, fails=fails)

    def part(self) -> None:
        of = between(self._draws, 1, MOST_PARTS)
        self._part(self._source(), between(self._draws, 1, of), of)

    def finish(self) -> None:
        self._ask(FinishWeightUpdate, version=self._version(), fails=once_in(self._draws, RARELY))

    def swap(self) -> None:
        source = self._source()
        self._ask(SwapWeights, source=source, version=self._version(), fails=once_in(self._draws, RARELY))

    def sleep(self) -> None:
        draws = self._draws
        self._ask(Sleep, level=one_of(draws, LEVELS), mode=one_of(draws, (None, None, *get_args(Mode))))

    def wake_up(self) -> None:
        self.operations.append(_WAKE_UPS[one_of(self._draws, TAGS)])

    def is_sleeping(self) -> None:
        self.operations.append(_IS_SLEEPING)

    def again(self) -> None:
        """The last call once more; a request is handed in twice, too."""
        last = next((one for one in reversed(self.operations) if not isinstance(one, Step | Advance)), _RESUME)
        self.operations.append(last)

    def session(self) -> None:
        """A weight session, of which now and then a part is missing, sent twice, or fails."""
        draws = self._draws
        self.start()
        self._meanwhile()
        source, of = self._source(), between(draws, 1, MOST_PARTS)
        for part in range(1, of + 1):
            if not once_in(draws, 2 * RARELY):
                self._part(source, part, of)
            if once_in(draws, RARELY):
                self.again()
            self._meanwhile()
        self.finish()

    def update(self) -> None:
        """What a trainer does: pause, new weights, resume; its own next request comes late, in time, or between."""
        draws = self._draws
        self.pause()
        if once_in(draws, 3):
            self.again()
        if once_in(draws, 2):
            self.steps()
        self._meanwhile()
        (self.session if once_in(draws, 2) else self.swap)()
        self._meanwhile()
        self.resume()

    def updates(self) -> None:
        """A trainer that updates more often than requests end: one lives through several, mostly with its cache kept."""
        self.submit(longest=True)
        for _ in range(between(self._draws, 2, 3)):
            self.steps()
            # The step lets a pause take effect over one that is in flight.
            self._ask(Pause, mode="keep", clear_cache=once_in(self._draws, 4))
            self.operations.append(_STEP)
            self.swap()
            self.operations.append(_RESUME)
        self.steps()

    def night(self) -> None:
        """What a trainer does that needs the memory: sleep, wake the weights, write them, wake the rest."""
        draws = self._draws
        self.sleep()
        self.operations.append(_STEP)
        self._meanwhile()
        if once_in(draws, 2):
            self.operations.append(_WAKE_UPS["weights",])
            (self.session if once_in(draws, 3) else self.swap)()
            self._meanwhile()
        if once_in(draws, RARELY):
            self.sleep()
        self.operations.append(_WAKE_UPS[None])
        if once_in(draws, 3):
            self.swap()
        self.steps()

    # Their parts.

    def _ask(self, verb: type[Operation], **fields: Any) -> None:
        self.operations.append(_operation(verb, **fields))

    def _source(self) -> WeightSource:
        """Now and then one of its tensors is bad: the first of a part, or one that others come before."""
        source = one_of(self._draws, SOURCES)
        if not (self._spoils and once_in(self._draws, 2 * RARELY)):
            return source
        return source.model_copy(update={"spoil": Spoil(tensor=2 * self._draws.below(2), how=one_of(self._draws, HOWS))})

    def _part(self, source: WeightSource, part: int, of: int) -> None:
        self._ask(UpdateWeights, source=source, part=part, of=of, fails=once_in(self._draws, RARELY))

    def _version(self) -> str | None:
        return one_of(self._draws, (None, *VERSIONS))

    def _meanwhile(self) -> None:
        """Somebody else's call may come in the middle."""
        if once_in(self._draws, 4):
            self.phrase(_INTRUSIONS)


Phrase = Callable[[_Writer], None]

_WEIGHTS: dict[Phrase, int] = {
    _Writer.submit: 6,
    _Writer.steps: 10,
    _Writer.burst: 2,
    _Writer.abort: 2,
    _Writer.abort_all: 1,
    _Writer.pause: 4,
    _Writer.resume: 4,
    _Writer.is_paused: 1,
    _Writer.reset: 2,
    _Writer.relabel: 1,
    _Writer.start: 1,
    _Writer.part: 1,
    _Writer.finish: 1,
    _Writer.swap: 2,
    _Writer.again: 2,
    _Writer.session: 1,
    _Writer.update: 3,
    _Writer.updates: 1,
    _Writer.sleep: 1,
    _Writer.wake_up: 1,
    _Writer.is_sleeping: 1,
    _Writer.night: 1,
}
_ALL = tuple(phrase for phrase, weight in _WEIGHTS.items() for _ in range(weight))
_ALWAYS = (_Writer.submit, _Writer.steps)
"""Without these nothing would ever run."""
_INTRUSIONS = (_Writer.steps, _Writer.submit, _Writer.abort, _Writer.resume, _Writer.pause, _Writer.reset, _Writer.wake_up, _Writer.again)


def _weights(draws: Draws) -> Sequence[Phrase]:
    """What to draw phrases from, each as often as it is likely."""
    if not once_in(draws, 2):
        return _ALL
    chosen: list[Phrase] = []
    for phrase in _WEIGHTS:
        if once_in(draws, 2):
            chosen += [phrase] * (1 << draws.below(4))
    return [*chosen, *_ALWAYS * (1 + len(chosen) // 4)]


@cache
def _prompt(tokens: int, seed: int, prefix: tuple[int, int] | None) -> Prompt:
    """Equal prompts are one object; there are a few hundred."""
    return Prompt(tokens=tokens, seed=seed, prefix=None if prefix is None else TokenRun(tokens=prefix[0], seed=prefix[1]))


@cache
def _operation(verb: type[Operation], **fields: Any) -> Operation:
    """Equal ones are one object; there are about a thousand."""
    return verb(**fields)


_STEP = Step()
_ADVANCES = {count: Advance(steps=count) for count in range(2, 7)}
_ABORT_ALL = Abort(ids="all")
_RESUME, _IS_PAUSED, _RESET, _IS_SLEEPING = Resume(), IsPaused(), ResetPrefixCache(), IsSleeping()
_WAKE_UPS: dict[tuple[Tag, ...] | None, WakeUp] = {tags: WakeUp(tags=tags) for tags in TAGS}
