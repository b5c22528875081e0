"""The state of a data-parallel deployment's control plane, small enough to enumerate.

What is kept is only what decides who may move next and whether a promise is broken. These
simplifications keep the state small, and none hides an order of events that matters:

- Waves are not numbered: every wave number in flight is held as how many waves it is *behind* the
  ranks' own (0 = current). All ranks change waves together, so they share one number.
- A wave start to a running rank, or for a wave that is over, changes nothing whenever it arrives, and
  a second one beside a first changes nothing either. So one bit says whether one is on its way.
- What a rank tells a caller is there at once: a caller may let any time pass before its next call, so
  a slow answer adds no order of events.
- What the coordinator publishes takes its time only while a caller has a request to add or a drain to
  do, for these alone ask what the front end believes; after that it is there at once.
- A collective completes as the last rank enters it: no rank can do anything else in between. The
  all-reduce follows its step at once on every rank, so the two are one collective.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Verb = Literal["pause abort", "pause keep", "pause wait", "weights", "resume"]
"""A control call: the front end sends it to every rank."""

Pause = Literal["no", "pending", "effective"]

Kind = Literal["step", "weights", "resume"]
"""A collective. `step` is a forward pass, real or dummy, with the all-reduce that may follow it."""


class Add(NamedTuple):
    """A caller's operation: a request for `rank` that needs `steps` forward passes."""

    rank: int
    steps: int = 2


Operation = Add | Verb | Literal["drain"]
"""What a caller does. `drain` waits until the front end believes that no rank is stepping."""


class Share(NamedTuple):
    """A request that a rank holds, and how many forward passes it still needs."""

    request: int
    left: int


class Added(NamedTuple):
    """Front end to rank: a request, tagged with the wave that the front end took to be current."""

    share: Share
    behind: int


class Asked(NamedTuple):
    """Front end to rank: a caller's control call."""

    caller: int
    verb: Verb


class Report(NamedTuple):
    """Rank to coordinator. Rank 0 says that it runs or idles; any rank may want a wave started."""

    what: Literal["running", "idle", "wanted"]
    behind: int


class Belief(NamedTuple):
    """What the coordinator, and after it the front end, takes the ranks to do."""

    behind: int
    running: bool


class Entered(NamedTuple):
    """A collective that a rank waits in, and for `weights` and `resume` the caller that asked for it."""

    kind: Kind
    caller: int | None = None


class Rank(NamedTuple):
    """One engine core and the messages on their way to it and from it, oldest first."""

    inbox: tuple[Added | Asked, ...] = ()  # from the front end
    start: bool = False  # from the coordinator: a start of the current wave
    outbox: tuple[Report, ...] = ()  # to the coordinator
    running: bool = False  # in the stepping loop
    entered: Entered | None = None
    pause: Pause = "no"
    joined: tuple[int, ...] = ()  # callers that wait for the pause to take effect
    live: tuple[Share, ...] = ()  # requests that may be scheduled
    parked: tuple[Share, ...] = ()  # requests that wait for a resume
    taken: int = 0  # control calls taken up


class Caller(NamedTuple):
    """A caller of the front end: its next operation, and how many ranks have yet to answer its open call."""

    position: int = 0
    unanswered: int = 0


class Violation(NamedTuple):
    """A broken promise: the invariant's id and what happened."""

    invariant: str
    sentence: str


class State(NamedTuple):
    """Everything that decides what may happen next."""

    ranks: tuple[Rank, ...]
    callers: tuple[Caller, ...]
    ended: tuple[bool, ...]  # for each request, whether its end was reported
    coordinator: Belief = Belief(0, False)
    front_end: Belief = Belief(0, False)
    firsts: tuple[int, ...] = ()  # front end to coordinator: first requests, by how far behind their wave is
    published: tuple[Belief, ...] = ()  # coordinator to front end
    steps: int = 0  # since the last all-reduce; equal on all ranks, for steps complete together
    branches: tuple[str, ...] = ()  # what the first rank to take up each control call did
    violation: Violation | None = None
