"""Bounded exhaustive search of a state machine: every order of its moves, each state once.

Breadth first, so that the counterexample is a shortest one. A state that was seen is not entered again
(Holzmann, "The model checker SPIN", 1997); states are compared whole, so no collision of hashes can hide
one. Beyond bad states and bad ends the search looks for states from which no end can be reached any more,
which is how a hang looks when something still spins. Order of results depends on the order in which
`moves` yields and on nothing else.
"""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

State = TypeVar("State", bound=Hashable)
Move = TypeVar("Move")


class System(Protocol[State, Move]):
    """What can be explored."""

    def initial(self) -> State: ...

    def moves(self, state: State) -> Iterable[tuple[Move, State]]:
        """Every move that is possible, with the state after it, in a fixed order."""
        ...

    def broken(self, state: State) -> tuple[str, str] | None:
        """The invariant that this state breaks and a sentence why, or None."""
        ...

    def ends_badly(self, state: State) -> tuple[str, str] | None:
        """For a state without moves: the invariant that ending here breaks and a sentence why, or None."""
        ...

    def never_ends(self, state: State) -> tuple[str, str]:
        """For a state that has moves but from which no end can be reached: invariant and sentence."""
        ...

    def words(self, before: State, move: Move, after: State) -> str:
        """A move in words."""
        ...


class Counterexample(NamedTuple):
    """A broken invariant and a shortest list of moves, in words, that breaks it."""

    invariant: str
    sentence: str
    steps: tuple[str, ...]


class Exploration(NamedTuple):
    """What a search saw. Without a violation and with `exhaustive`, the system has none; otherwise none was met."""

    states: int
    moves: int
    depth: int
    """The most moves that any state reached needs: a shortest path to it."""
    exhaustive: bool
    """Whether every reachable state was entered."""
    violation: Counterexample | None


def search(system: System[State, Move], *, max_states: int) -> Exploration:
    """Explore `system` until a violation, until nothing new is reached, or until `max_states` states are known.

    Memory is one state and a few integers for each state and move.
    """
    if max_states < 1:
        raise ValueError(f"max_states must be at least 1, got {max_states}")
    return _Search(system, max_states).run()


class _Search(Generic[State, Move]):
    def __init__(self, system: System[State, Move], max_states: int) -> None:
        self.system = system
        self.max_states = max_states
        self.states: list[State] = []
        self.number: dict[State, int] = {}
        self.parent, self.depth = array("q"), array("q")
        self.sources, self.targets = array("q"), array("q")
        self.ends: list[int] = []
        self.cut = False

    def run(self) -> Exploration:
        self._discover(self.system.initial(), parent=0, depth=0)
        at = 0
        while at < len(self.states):
            problem = self.system.broken(self.states[at]) or self._expand(at)
            if problem:
                return self._result(at, problem)
            at += 1
        hopeless = None if self.cut else self._first_without_end()
        return self._result(hopeless, None if hopeless is None else self.system.never_ends(self.states[hopeless]))

    def _discover(self, state: State, *, parent: int, depth: int) -> int | None:
        known = self.number.get(state)
        if known is not None:
            return known
        if len(self.states) == self.max_states:
            self.cut = True
            return None
        self.number[state] = len(self.states)
        self.states.append(state)
        self.parent.append(parent)
        self.depth.append(depth)
        return len(self.states) - 1

    def _expand(self, at: int) -> tuple[str, str] | None:
        moved = False
        for _, after in self.system.moves(self.states[at]):
            moved = True
            target = self._discover(after, parent=at, depth=self.depth[at] + 1)
            if target is not None:
                self.sources.append(at)
                self.targets.append(target)
        if moved:
            return None
        self.ends.append(at)
        return self.system.ends_badly(self.states[at])

    def _first_without_end(self) -> int | None:
        """The first state found from which no state without moves can be reached, by going backwards from those."""
        into: list[list[int]] = [[] for _ in self.states]
        for source, target in zip(self.sources, self.targets, strict=True):
            into[target].append(source)
        reaches = bytearray(len(self.states))
        frontier = list(self.ends)
        while frontier:
            at = frontier.pop()
            if not reaches[at]:
                reaches[at] = 1
                frontier.extend(into[at])
        first = reaches.find(0)
        return None if first < 0 else first

    def _result(self, at: int | None, problem: tuple[str, str] | None) -> Exploration:
        violation = None if at is None or problem is None else Counterexample(*problem, self._path_to(at))
        exhaustive = not self.cut and violation is None
        return Exploration(len(self.states), len(self.targets), max(self.depth), exhaustive, violation)

    def _path_to(self, at: int) -> tuple[str, ...]:
        """The moves that lead to a state, found again by making each of its ancestors move."""
        steps: list[str] = []
        while at:
            before, after = self.states[self.parent[at]], self.states[at]
            move = next(move for move, state in self.system.moves(before) if state == after)
            steps.append(self.system.words(before, move, after))
            at = self.parent[at]
        return tuple(reversed(steps))
