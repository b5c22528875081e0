"""What the control plane of data-parallel ranks promises (contract sections 4 and 6), judged on its states.

`one-ending` by a second ending and `idempotent-control` are noticed by the protocol when they happen; the
others are read off a state. `deadlock` is no invariant of its own: it is the name for a rank or a call
that waits for what will never come.
"""

from __future__ import annotations

from harness.ranks.protocol import DataParallel, Move
from harness.ranks.state import State, Violation
from harness.ranks.words import activity, move_in_words


class JudgedRanks(DataParallel):
    """The protocol with its promises: a system for the explorer."""

    def broken(self, state: State) -> Violation | None:
        """A promise that this state breaks, whatever comes next."""
        if state.violation:
            return state.violation
        if len({rank.entered.kind for rank in state.ranks if rank.entered}) > 1:
            return Violation("collective-symmetry", f"ranks wait for each other in different collectives: {activity(state)}")
        return None

    def ends_badly(self, state: State) -> Violation | None:
        """A promise that is broken if nothing more happens: no message on its way, no call due, no rank about to step."""
        if any(rank.entered for rank in state.ranks):
            return Violation("deadlock", f"nothing else can happen, and a collective is incomplete: {activity(state)}")
        stepping = any(rank.running for rank in state.ranks)
        for who, belief in (("coordinator", state.coordinator), ("front end", state.front_end)):
            if belief.running != stepping:
                return Violation("flags-converge", f"events have stopped; the {who} holds running={belief.running}, observed {stepping}")
        for number, (caller, script) in enumerate(zip(state.callers, self.callers, strict=True)):
            if caller.position < len(script):
                return Violation("deadlock", f"caller {number + 1}'s {script[caller.position]} never returns: {activity(state)}")
        left = [request for rank in state.ranks if rank.pause == "no" for request, _ in rank.live + rank.parked]
        if left:
            return Violation("one-ending", f"request r{left[0] + 1} never ends, though its rank is not paused: {activity(state)}")
        return None

    def never_ends(self, state: State) -> Violation:
        return Violation("deadlock", f"ranks step for ever and no continuation comes to rest: {activity(state)}")

    def words(self, before: State, move: Move, after: State) -> str:
        return move_in_words(self, before, move, after)
