"""The control plane of N data-parallel ranks as a pure state machine.

Mixture-of-experts ranks step together: an idle rank runs dummy batches while any rank works. Every
`agree_every` steps an all-reduce tells the ranks whether work is left anywhere; if not, the wave ends on
all of them. The front end tags a request with the wave it believes in and, if it believes that nobody
runs, tells the coordinator, which sends every rank a start of that wave. A rank that finds a request's
tag outdated asks the coordinator itself.

Pause is two-phase. A rank that takes up a pause is *pending* and steps on (an idle one starts to); when
the all-reduce finds all ranks pending, all stop together and are deaf to wave starts until the resume,
which is a barrier. Two rules here are needed and easily missed; without either the explorer finds a hang:

- ranks agree to stop, for a pause or for want of work, only if they have taken up equally many control
  calls: a rank may have gone through pause and resume, or pause and pause again, while another has yet to
  take up the first pause, which will make it step and need the others;
- a resume begins a new wave, for a start sent during the pause may reach one rank before the resume (and
  be ignored) and another after it.

Modelled on vLLM's control plane as its public threads describe it (vllm-project/vllm #36594, #39366,
#51481, #55229). Every channel delivers in order, as late as it likes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from harness.ranks.state import Add, Added, Asked, Belief, Caller, Entered, Operation, Rank, Report, Share, State, Violation

Item = TypeVar("Item")


class Move(NamedTuple):
    """What happens next: `actor` is a rank or caller where one acts."""

    what: str
    actor: int = 0


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The rules that ranks and coordinator follow. The defaults are the correct protocol; each flag plants one fault."""

    agree_every: int = 2
    """Steps from one all-reduce to the next. vLLM's is 16 or 32; 2 is the least that leaves a step without one."""
    heeds_starts_while_paused: bool = False
    """K36: a late wave start wakes a rank that is paused (vllm #36594)."""
    predicts_running: bool = False
    """K37: the coordinator says `running` when it forwards a start, not when rank 0 reports it (vllm #51481)."""
    resume_asks_running: bool = False
    """K38: resume enters the barrier if this rank is not stepping, rather than if it is paused (vllm #55229)."""
    agrees_across_calls: bool = False
    """Ranks agree to stop though they have not taken up the same control calls."""
    resume_keeps_wave: bool = False
    """Resume does not begin a new wave, so that starts sent during the pause remain valid."""
    resume_forgets_parked: bool = False
    """Resume leaves the requests that arrived during the pause where they are."""


class DataParallel:
    """Ranks, coordinator and front end, driven by callers that each perform their operations in order."""

    def __init__(self, callers: tuple[tuple[Operation, ...], ...], ranks: int, protocol: Protocol) -> None:
        self.callers = callers
        self.protocol = protocol
        self.ranks = ranks
        adds = [(number, at) for number, script in enumerate(callers) for at, operation in enumerate(script) if isinstance(operation, Add)]
        self.requests = {place: request for request, place in enumerate(adds)}
        looks = [[at for at, operation in enumerate(script) if isinstance(operation, Add) or operation == "drain"] for script in callers]
        self.last_look = [at[-1] if at else -1 for at in looks]

    def initial(self) -> State:
        return State(
            ranks=(Rank(),) * self.ranks,
            callers=(Caller(),) * len(self.callers),
            ended=(False,) * len(self.requests),
        )

    def moves(self, state: State) -> Iterator[tuple[Move, State]]:
        """Everything that may happen next, with the state after it."""
        for caller, script in enumerate(self.callers):
            position, unanswered = state.callers[caller]
            if position < len(script) and not unanswered and (script[position] != "drain" or not state.front_end.running):
                yield Move("call", caller), self._call(state, caller, script[position])
        if state.firsts:
            yield Move("first"), self._first_request(state)
        if state.published:
            yield Move("published"), state._replace(front_end=state.published[0], published=state.published[1:])
        for at, rank in enumerate(state.ranks):
            if rank.outbox:
                yield Move("report", at), self._report(state, at)
            if rank.entered:
                continue
            if rank.inbox:
                yield Move("inbox", at), self._take_up(state, at)
            if rank.start:
                yield Move("start", at), self._started(state, at)
            if rank.running:
                yield Move("step", at), self._enter(state, at, Entered("step"))

    # The front end

    def _call(self, state: State, caller: int, operation: Operation) -> State:
        position = state.callers[caller].position
        if operation == "drain":
            return self._inform(state._replace(callers=_put(state.callers, caller, Caller(position + 1))))
        if isinstance(operation, Add):
            request = Added(Share(self.requests[caller, position], operation.steps), state.front_end.behind)
            rank = state.ranks[operation.rank]
            state = state._replace(
                callers=_put(state.callers, caller, Caller(position + 1)),
                ranks=_put(state.ranks, operation.rank, rank._replace(inbox=(*rank.inbox, request))),
                firsts=state.firsts if state.front_end.running else (*state.firsts, state.front_end.behind),
            )
            return self._inform(state)
        return state._replace(
            callers=_put(state.callers, caller, Caller(position, unanswered=self.ranks)),
            ranks=tuple(rank._replace(inbox=(*rank.inbox, Asked(caller, operation))) for rank in state.ranks),
        )

    def _inform(self, state: State) -> State:
        """Let the front end know all that was published once no caller will look at it again (see state.py)."""
        if not state.published or any(caller.position <= last for caller, last in zip(state.callers, self.last_look, strict=True)):
            return state
        return state._replace(front_end=state.published[-1], published=())

    # The coordinator

    def _first_request(self, state: State) -> State:
        state = state._replace(firsts=state.firsts[1:])
        if self.protocol.predicts_running:
            state = self._believe(state, state.coordinator._replace(running=True))
        return _broadcast_start(state)

    def _report(self, state: State, at: int) -> State:
        rank = state.ranks[at]
        report, known = rank.outbox[0], state.coordinator
        state = _with_rank(state, at, rank._replace(outbox=rank.outbox[1:]))
        behind = min(known.behind, report.behind)  # another rank may have told of a later wave already
        if report.what == "wanted":
            return _broadcast_start(self._believe(state, Belief(behind, known.running)))
        return self._believe(state, Belief(behind, report.what == "running"))

    def _believe(self, state: State, belief: Belief) -> State:
        if belief == state.coordinator:
            return state
        return self._inform(state._replace(coordinator=belief, published=(*state.published, belief)))

    # A rank between two steps

    def _started(self, state: State, at: int) -> State:
        deaf = state.ranks[at].pause == "effective" and not self.protocol.heeds_starts_while_paused
        return _with_rank(state, at, state.ranks[at]._replace(start=False)) if deaf else _run(state, at)

    def _take_up(self, state: State, at: int) -> State:
        rank = state.ranks[at]
        message = rank.inbox[0]
        rank = rank._replace(inbox=rank.inbox[1:])
        if isinstance(message, Added):
            return self._accept(_with_rank(state, at, rank), at, message)
        state = _with_rank(state, at, rank._replace(taken=rank.taken + 1))
        if message.verb == "resume":
            return self._resume(state, at, message)
        if message.verb == "weights":
            return self._weights(state, at, message)
        return self._pause(state, at, message)

    def _accept(self, state: State, at: int, message: Added) -> State:
        rank = state.ranks[at]
        if rank.pause != "no":
            return _with_rank(state, at, rank._replace(parked=(*rank.parked, message.share)))
        state = _with_rank(state, at, rank._replace(live=(*rank.live, message.share)))
        if rank.running:
            return state
        return _want_wave(_run(state, at), at) if message.behind else _run(state, at)

    def _pause(self, state: State, at: int, message: Asked) -> State:
        rank = state.ranks[at]
        live, parked = rank.live, rank.parked
        if message.verb == "pause abort":
            state, live, parked = _end(state, live + parked), (), ()
        elif message.verb == "pause keep":
            live, parked = (), live + parked
        else:
            live, parked = live + parked, ()
        state = _with_rank(state, at, rank._replace(live=live, parked=parked))
        if rank.pause == "effective" and message.verb != "pause wait":
            return _answer(_branch(state, at, message, "already paused"), message.caller)
        state = _branch(state, at, message, "pending")
        rank = state.ranks[at]
        return _run(_with_rank(state, at, rank._replace(pause="pending", joined=(*rank.joined, message.caller))), at)

    def _weights(self, state: State, at: int, message: Asked) -> State:
        if state.ranks[at].pause != "effective":
            return _answer(_branch(state, at, message, "refused"), message.caller)
        return self._enter(_branch(state, at, message, "transfer"), at, Entered("weights", message.caller))

    def _resume(self, state: State, at: int, message: Asked) -> State:
        rank = state.ranks[at]
        barrier = not rank.running if self.protocol.resume_asks_running else rank.pause == "effective"
        if barrier:
            return self._enter(_branch(state, at, message, "barrier"), at, Entered("resume", message.caller))
        state = _branch(state, at, message, "nothing to do" if rank.pause == "no" else "pause given up")
        for caller in (*rank.joined, message.caller):
            state = _answer(state, caller)
        return self._unpause(state, at)

    def _unpause(self, state: State, at: int) -> State:
        rank = state.ranks[at]._replace(pause="no", joined=())
        if not self.protocol.resume_forgets_parked:
            rank = rank._replace(live=rank.live + rank.parked, parked=())
        return _with_rank(state, at, rank)

    # Collectives

    def _enter(self, state: State, at: int, entered: Entered) -> State:
        state = _with_rank(state, at, state.ranks[at]._replace(entered=entered))
        if any(rank.entered is None or rank.entered.kind != entered.kind for rank in state.ranks):
            return state
        callers = [rank.entered.caller for rank in state.ranks if rank.entered]
        state = state._replace(ranks=tuple(rank._replace(entered=None) for rank in state.ranks))
        for caller in callers:
            state = state if caller is None else _answer(state, caller)
        if entered.kind == "step":
            return self._step_done(state)
        return self._resume_done(state) if entered.kind == "resume" else state

    def _step_done(self, state: State) -> State:
        for at, rank in enumerate(state.ranks):
            if rank.live:
                state = _end(state, tuple(share for share in rank.live if share.left == 1))
                left = tuple(Share(request, left - 1) for request, left in rank.live if left > 1)
                state = _with_rank(state, at, rank._replace(live=left))
        state = state._replace(steps=(state.steps + 1) % self.protocol.agree_every)
        return state if state.steps else self._all_reduce(state)

    def _all_reduce(self, state: State) -> State:
        ranks = state.ranks
        same_calls = self.protocol.agrees_across_calls or len({rank.taken for rank in ranks}) == 1
        if not same_calls or any(rank.live for rank in ranks):
            return state
        pending = [rank.pause == "pending" for rank in ranks]
        if any(pending) and not all(pending):
            return state
        if all(pending):
            for caller in [caller for rank in ranks for caller in rank.joined]:
                state = _answer(state, caller)
            ranks = tuple(rank._replace(pause="effective", joined=()) for rank in state.ranks)
        state = _next_wave(state._replace(ranks=tuple(rank._replace(running=False) for rank in ranks)))
        return _tell(state, 0, Report("idle", 0))

    def _resume_done(self, state: State) -> State:
        if not self.protocol.resume_keeps_wave:
            state = _tell(_next_wave(state), 0, Report("idle", 0))
        for at in range(self.ranks):
            state = self._unpause(state, at)
            if state.ranks[at].live:
                state = _want_wave(_run(state, at), at)
        return state


def _put(items: tuple[Item, ...], at: int, item: Item) -> tuple[Item, ...]:
    return (*items[:at], item, *items[at + 1 :])


def _with_rank(state: State, at: int, rank: Rank) -> State:
    return state._replace(ranks=_put(state.ranks, at, rank))


def _tell(state: State, at: int, report: Report) -> State:
    rank = state.ranks[at]
    return _with_rank(state, at, rank._replace(outbox=(*rank.outbox, report)))


def _want_wave(state: State, at: int) -> State:
    return _tell(state, at, Report("wanted", 0))


def _run(state: State, at: int) -> State:
    """Let a rank step; one that is running already is left alone."""
    rank = state.ranks[at]
    if rank.running:
        return state
    state = _with_rank(state, at, rank._replace(running=True, start=False))
    return _tell(state, at, Report("running", 0)) if at == 0 else state


def _broadcast_start(state: State) -> State:
    """Send a start of the wave that the coordinator knows; it counts only if that is current (see state.py)."""
    if state.coordinator.behind:
        return state
    return state._replace(ranks=tuple(rank if rank.running else rank._replace(start=True) for rank in state.ranks))


def _next_wave(state: State) -> State:
    """All ranks move to the next wave; whatever names a wave is one further behind."""
    return state._replace(
        ranks=tuple(
            rank._replace(
                inbox=tuple(m._replace(behind=m.behind + 1) if isinstance(m, Added) else m for m in rank.inbox),
                outbox=tuple(r._replace(behind=r.behind + 1) for r in rank.outbox),
                start=False,
            )
            for rank in state.ranks
        ),
        coordinator=state.coordinator._replace(behind=state.coordinator.behind + 1),
        front_end=state.front_end._replace(behind=state.front_end.behind + 1),
        firsts=tuple(behind + 1 for behind in state.firsts),
        published=tuple(belief._replace(behind=belief.behind + 1) for belief in state.published),
    )


def _answer(state: State, caller: int) -> State:
    position, unanswered = state.callers[caller]
    assert unanswered > 0, f"caller {caller} was answered though its call had returned: {state}"
    done = unanswered == 1
    return state._replace(callers=_put(state.callers, caller, Caller(position + done, unanswered - 1)))


def _end(state: State, shares: tuple[Share, ...]) -> State:
    for request, _ in shares:
        if state.ended[request]:
            state = state._replace(violation=Violation("one-ending", f"request r{request + 1} ended twice"))
        state = state._replace(ended=_put(state.ended, request, True))
    return state


def _branch(state: State, at: int, message: Asked, branch: str) -> State:
    """Record what a rank made of a control call, and whether the ranks before it made the same of it."""
    number = state.ranks[at].taken - 1
    if number == len(state.branches):
        return state._replace(branches=(*state.branches, branch))
    if state.branches[number] == branch:
        return state
    sentence = f"one call ({message.verb}), two branches: rank {at} took `{branch}`, a rank before it `{state.branches[number]}`"
    return state._replace(violation=Violation("idempotent-control", sentence))
