"""The numbers themselves: whether a token is the one that the weights and the KV give."""

from __future__ import annotations

from harness.events import Accepted, Blocked, Landed, Reference
from harness.invariants.invariant import Invariant, invariant, listed
from harness.replay import NEVER, Replay, Request
from harness.stretch import Stretch

ORACLES = {
    "fresh": "a fresh engine on the weights that sampled it",
    "unpaused": "an engine that was never paused",
    "mixed": "the mixed replay, which recomputes every KV entry as the log says",
}


@invariant("golden", level=1)
class Golden(Invariant):
    """A token is the one that its weights give: where a clear was promised or no update was crossed, that of a fresh
    engine on them; otherwise that of a mixed replay, which recomputes every KV entry as the log says. Greedy or drawn."""

    def __init__(self, replay: Replay) -> None:
        super().__init__(replay)
        self._requests: dict[str, list[Request]] = {}
        """Every request of an id, in order."""
        self._sampled: list[tuple[int, list[str]]] = []
        """For each step, the number of its `landed` event and whose tokens it has."""

    def after_accepted(self, seq: int, event: Accepted) -> None:
        self._note(event.request)

    def after_blocked(self, seq: int, event: Blocked) -> None:
        self._note(event.request)

    def _note(self, id: str) -> None:
        request, known = self.replay.requests[id], self._requests.setdefault(id, [])
        if not known or known[-1] is not request:
            known.append(request)

    def after_landed(self, seq: int, event: Landed) -> None:
        self._sampled.append((seq, [id for id, _ in event.sampled]))

    def steady_step(self, stretch: Stretch) -> None:
        self._sampled.append((stretch.launched + 1, stretch.ids))

    def before_reference(self, seq: int, event: Reference) -> None:
        self.checked += 1
        known = self._requests.get(event.request, ())
        request = known[event.nth - 1] if 0 < event.nth <= len(known) else None
        got = tuple(request.output[event.first : event.first + len(event.tokens)]) if request else ()
        if request is None or len(got) < len(event.tokens):
            self.violated(
                seq,
                f"a reference of {event.request} is for tokens that no step sampled",
                expected=f"request {event.nth} of that id with {event.first + len(event.tokens)} tokens",
                got=f"{len(request.output)} tokens" if request else f"{len(known)} requests of that id",
            )
        elif got != event.tokens:
            self._differs(event, request, got)

    def _differs(self, event: Reference, request: Request, got: tuple[int, ...]) -> None:
        wrong = [index for index, (a, b) in enumerate(zip(event.tokens, got, strict=True)) if a != b]
        index = event.first + wrong[0]
        weights = request.sampling_weights(index)
        begun = self.replay.epoch_starts[weights.epoch]
        differing = listed(place + event.first for place in wrong)
        self.violated(
            self._sampled_at(request, index),
            f"token {index} of {request.id} is not that of {ORACLES[event.kind]}",
            expected=f"{event.tokens[wrong[0]]} from weights {weights.version}, given the {index} tokens before it",
            got=f"{got[wrong[0]]}; of the {len(got)} tokens from {event.first} on, {len(wrong)} differ: {differing}",
            cause=[(begun, f"first byte of epoch {weights.epoch}, whose weights sampled it"), (request.seen, f"{request.id} was taken on")],
        )

    def _sampled_at(self, request: Request, index: int) -> int:
        """Number of the `landed` event with output token `index`."""
        mine = (seq for seq, ids in self._sampled if seq > request.seen and request.id in ids)
        return next((seq for place, seq in enumerate(mine) if place == index), NEVER)

    def unseen(self) -> str | None:
        return None if self.checked else "the log has no `reference` events: nobody recomputed its tokens"
