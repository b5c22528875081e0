"""What following an engine with the model costs: milliseconds added to a lockstep step of `tiny`.

Three decodes of the same requests on one engine each, side by side: bare, with the model explaining every event and
every whole state compared, and with the log written and every invariant judged besides.

    python benchmarks/comparison.py
"""

from __future__ import annotations

import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers

from harness.backends import make_backend
from harness.conformance import Explainer
from harness.events import Called
from harness.execute import Journal, Listener
from harness.invariants import Judge
from harness.log import LogWriter
from harness.operations import Operation, Prompt, Submit, to_data
from harness.scenario import EngineShape
from harness.trial import opened_event

REQUESTS = 4
STEPS = 200
ROUNDS = 7
SHAPE = EngineShape(checkpoint="tiny", block_size=16, num_blocks=128, max_model_len=512, max_num_seqs=REQUESTS)


class Decode:
    """One engine that decodes `REQUESTS` requests, with whoever listens."""

    def __init__(self, make_listeners: Callable[[Decode], Sequence[Listener]]) -> None:
        self.backend = make_backend("torch")
        info = self.backend.start(SHAPE)
        self.journal = Journal("r0", make_listeners(self))
        self.journal.write([opened_event(SHAPE, self.backend, info, digest="", seed=0)])
        self.ops = 0

    def call(self, operation: Operation) -> None:
        self.journal.write([Called(op=self.ops, operation=to_data(operation), by="benchmark"), *self.backend.apply(self.ops, operation)])
        self.ops += 1

    def step_ms(self, round_number: int) -> float:
        """Median milliseconds of a steady decode step; the requests run to their end."""
        for index in range(REQUESTS):
            self.call(Submit(id=f"r{index}", prompt=Prompt(tokens=16, seed=round_number * REQUESTS + index), max_tokens=STEPS))
        times = []
        while self.backend.has_work():
            began = time.perf_counter()
            self.journal.now_ns += 1_000_000
            self.journal.write(self.backend.step())
            times.append((time.perf_counter() - began) * 1e3)
        return statistics.median(times[1:])


def compared(decode: Decode) -> list[Listener]:
    explainer = Explainer()
    return [explainer.feed, lambda _: explainer.compare_state(decode.backend.state())]


def recorded_and_judged(decode: Decode) -> list[Listener]:
    writer, judge = LogWriter(Path(tempfile.mkdtemp())), Judge()
    return [lambda news: writer.append(news[0].t_ns, [entry.event for entry in news]), judge.feed, *compared(decode)]


def main() -> None:
    torch.set_num_threads(1)
    decodes = {"bare": Decode(lambda _: []), "compared": Decode(compared), "and recorded and judged": Decode(recorded_and_judged)}
    medians: dict[str, list[float]] = {name: [] for name in decodes}
    for round_number in range(ROUNDS):
        for name, decode in decodes.items():
            medians[name].append(decode.step_ms(round_number))
    print(f"{platform.platform()}; Python {platform.python_version()}, torch {torch.__version__}, transformers {transformers.__version__}")
    print(f"command: python benchmarks/comparison.py ({REQUESTS} requests, {STEPS} steps, {ROUNDS} rounds side by side, one thread)")
    bare = statistics.median(medians["bare"])
    for name, values in medians.items():
        added = statistics.median(value - base for value, base in zip(values, medians["bare"], strict=True))
        print(f"{name:<24} {statistics.median(values):6.3f} ms a step, {added:+.3f} ms, x{statistics.median(values) / bare:.2f}")


if __name__ == "__main__":
    main()
