"""A toy engine with the methods of `harness.Engine`; docs/your-engine.md goes through it.

It is wrong. `caesura fuzz --engine examples/toy_engine.py:ToyEngine` says how. `Mended` is right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness import EngineShape, Refused, Token


class ToyEngine:
    """Two requests run at a time; a token is a function of its place and the weights."""

    slots = 2

    def __init__(self, shape: EngineShape) -> None:
        self.longest = min(shape.max_model_len, shape.num_blocks * shape.block_size)  # tokens, prompt and output
        self.waiting: dict[str, int] = {}  # tokens still to come, by id
        self.running: dict[str, int] = {}
        self.late: set[str] = set()  # those that came while paused
        self.mode: str | None = None
        self.weights = 0

    def submit(self, id: str, prompt: Sequence[int], max_tokens: int) -> None:
        if id in self.waiting or id in self.running:
            raise Refused(f"{id} is live")
        if not 0 < len(prompt) < self.longest or max_tokens < 1:
            raise Refused("a request needs a prompt and room for a token")
        self.waiting[id] = min(max_tokens, self.longest - len(prompt))
        if self.mode is not None:
            self.late.add(id)

    def abort(self, ids: Sequence[str] | None) -> list[str]:
        live = [*self.running, *self.waiting]
        return self._end(live if ids is None else [id for id in dict.fromkeys(ids) if id in live])

    def has_work(self) -> bool:
        return self.mode in (None, "wait") and bool(self.running or self.waiting.keys() - self.late)

    def step(self) -> Iterator[Token]:
        admitted = [id for id in self.waiting if id not in self.late][: self.slots - len(self.running)]
        self.running |= {id: self.waiting.pop(id) for id in admitted}
        for id, left in list(self.running.items()):
            self.running[id] = left - 1
            if left == 1:
                self._end([id])
            yield Token(id, (left * 31 + self.weights) % 256, "length" if left == 1 else None)

    def pause(self, mode: str, clear_cache: bool) -> list[str]:
        self.mode = mode
        if mode == "wait":
            self.late.clear()
        return self._end(list(self.running)) if mode == "abort" else []

    def quiet(self) -> bool:
        return not self.has_work()

    def resume(self) -> None:
        self.mode = None
        self.late.clear()

    def swap_weights(self, seed: int, version: str) -> None:
        if self.mode is None or not self.quiet():
            raise Refused("pause first", code="conflict")
        self.weights = seed

    def _end(self, ids: list[str]) -> list[str]:
        for id in ids:
            self.late.discard(id)
            self.running.pop(id, None) or self.waiting.pop(id, None)
        return ids


class Mended(ToyEngine):
    """`abort` ends those that wait, too."""

    def pause(self, mode: str, clear_cache: bool) -> list[str]:
        super().pause("keep" if mode == "abort" else mode, clear_cache)
        self.mode = mode
        return self.abort(None) if mode == "abort" else []
