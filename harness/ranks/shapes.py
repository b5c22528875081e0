"""Small scenarios of the control plane, by name, and their exhaustive exploration.

A shape is what each caller does, in order; callers run concurrently. Requests go to ranks 0 and 1 only,
so that every shape fits every number of ranks; the others then run nothing but dummy batches.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from harness.errors import BadInput
from harness.ranks.explorer import Exploration, search
from harness.ranks.promises import JudgedRanks
from harness.ranks.protocol import Protocol
from harness.ranks.state import Add, Operation

RANKS = range(2, 5)
"""How many ranks `explore` accepts: one has nobody to agree with, and five would take too long."""

MAX_STATES = 1_000_000
"""The default bound: about a minute in CPython, and 1 GB."""


class Shape(NamedTuple):
    """A scenario: one tuple of operations for each concurrent caller."""

    about: str
    callers: tuple[tuple[Operation, ...], ...]


SHAPES = {
    "waves": Shape("requests only: waves start and end", ((Add(0), Add(1)), (Add(1),))),
    "pause-resume-wave": Shape(
        "a weight update in full, resumed twice, while a request arrives",
        (("pause abort", "drain", "weights", "resume", "resume"), (Add(0),)),
    ),
    "pause-two-requests": Shape("a weight update while two ranks are given work", (("pause abort", "weights", "resume"), (Add(0), Add(1)))),
    "pause-and-stay": Shape("a pause that nobody ends, while a request arrives", (("pause abort", "drain"), (Add(0),))),
    "keep-then-wait": Shape(
        "requests frozen across an update, then run to their end under the pause",
        (("pause keep", "weights", "pause wait", "resume"), (Add(0),)),
    ),
    "two-controllers": Shape(
        "two callers that pause and resume over each other, while a request arrives",
        (("pause abort", "weights", "resume"), ("pause keep", "weights", "resume"), (Add(0),)),
    ),
    "resume-over-pause": Shape(
        "a resume that may overtake a pending pause, while a request arrives",
        (("pause abort", "weights", "resume"), ("resume",), (Add(0),)),
    ),
}

FAULTS = {
    "K36": "heeds_starts_while_paused",
    "K37": "predicts_running",
    "K38": "resume_asks_running",
    "agrees-across-calls": "agrees_across_calls",
    "resume-keeps-wave": "resume_keeps_wave",
    "resume-forgets-parked": "resume_forgets_parked",
}
"""The faults that can be planted, and the field of `Protocol` that plants each. K numbers are known failures of real engines."""


def explore(shape: str, ranks: int, *, faults: Iterable[str] = (), max_states: int = MAX_STATES) -> Exploration:
    """Try every order of events of a shape on 2 to 4 ranks, under the correct protocol or with faults planted.

    Raises BadInput for a shape, a number of ranks or a fault that does not exist, naming those that do.
    """
    faults = tuple(faults)
    if shape not in SHAPES:
        raise BadInput(f"no shape {shape!r}; there are {', '.join(SHAPES)}")
    if ranks not in RANKS:
        raise BadInput(f"cannot explore {ranks} ranks; choose {RANKS.start} to {RANKS.stop - 1}")
    unknown = [fault for fault in faults if fault not in FAULTS]
    if unknown:
        raise BadInput(f"no fault {unknown[0]!r}; there are {', '.join(FAULTS)}")
    protocol = Protocol(**{FAULTS[fault]: True for fault in faults})
    return search(JudgedRanks(SHAPES[shape].callers, ranks, protocol), max_states=max_states)
