"""Moves and states of data-parallel ranks in words, for counterexamples that people read."""

from __future__ import annotations

from harness.ranks.protocol import DataParallel, Move
from harness.ranks.state import Add, Added, Rank, State


def move_in_words(system: DataParallel, before: State, move: Move, after: State) -> str:
    """What happened between two states, from the point of view of the one who acted."""
    if move.what == "call":
        return _call(system, before, move.actor, after)
    if move.what == "first":
        return f"the coordinator learns of a first request and sends a wave start{_outcome(before, after)}"
    if move.what == "published":
        return f"the front end learns: running={after.front_end.running}"
    if move.what == "report":
        report = before.ranks[move.actor].outbox[0]
        if report.what == "wanted":
            return f"the coordinator learns that rank {move.actor} wants a wave and sends a wave start{_outcome(before, after)}"
        return f"the coordinator learns that rank {move.actor} is {report.what}"
    if move.what == "start":
        woke = after.ranks[move.actor].running
        return f"the wave start reaches rank {move.actor}, which {'begins to step' if woke else 'is paused and ignores it'}"
    if move.what == "step":
        step = "step" if before.ranks[move.actor].live else "dummy step"
        return f"rank {move.actor} enters a {step}{_completed(before, after, move.actor)}"
    return _taken_up(before, after, move.actor)


def activity(state: State) -> str:
    """What each rank is doing."""
    return "; ".join(f"rank {at} {_doing(rank)}" for at, rank in enumerate(state.ranks))


def _doing(rank: Rank) -> str:
    if rank.entered:
        return f"waits in {rank.entered.kind}"
    doing = "steps" if rank.running else "is idle"
    return doing if rank.pause == "no" else f"{doing}, pause {rank.pause}"


def _call(system: DataParallel, before: State, caller: int, after: State) -> str:
    position = before.callers[caller].position
    operation = system.callers[caller][position]
    who = f"caller {caller + 1}"
    if operation == "drain":
        return f"{who}'s drain returns"
    if not isinstance(operation, Add):
        return f"{who} calls {operation}"
    told = " and tells the coordinator" if len(after.firsts) > len(before.firsts) else ""
    return f"{who} adds r{system.requests[caller, position] + 1} for rank {operation.rank}{told}"


def _outcome(before: State, after: State) -> str:
    due = [str(at) for at, (old, new) in enumerate(zip(before.ranks, after.ranks, strict=True)) if new.start and not old.start]
    return f" (due at rank {', '.join(due)})" if due else " (of no effect)"


def _taken_up(before: State, after: State, at: int) -> str:
    message, rank = before.ranks[at].inbox[0], after.ranks[at]
    if isinstance(message, Added):
        request = f"rank {at} takes up r{message.share.request + 1}"
        if len(rank.parked) > len(before.ranks[at].parked):
            return f"{request} and parks it"
        asks = any(report.what == "wanted" for report in rank.outbox[len(before.ranks[at].outbox) :])
        return f"{request} and asks for a wave" if asks else request
    return f"rank {at} takes up {message.verb} of caller {message.caller + 1}: {_made_of(before, after, at)}"


def _made_of(before: State, after: State, at: int) -> str:
    number = before.ranks[at].taken
    if after.violation and after.violation.invariant == "idempotent-control":
        return "otherwise than a rank before it"
    branch = after.branches[number]
    return f"{branch}{_completed(before, after, at)}" if branch in ("transfer", "barrier") else branch


def _completed(before: State, after: State, at: int) -> str:
    if after.ranks[at].entered:
        return " and waits"
    if before.ranks[at].pause == "pending" and after.ranks[at].pause == "effective":
        return "; it completes, all agree to pause"
    if before.ranks[at].running and not after.ranks[at].running:
        return "; it completes, all agree that no work is left"
    return "; it completes on every rank"
