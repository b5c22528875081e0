"""Tokens per second of replay with every invariant: stepping through a log, and straight from its file with steady stretches taken at once.

The logs are the model's own: 16 and 64 requests in steady decode, in blocks of 16, 32 and 64 tokens. Both ways give one verdict
(property_tests/properties/test_stretch.py), and the script stops if they do not.

    python benchmarks/replay.py
"""

from __future__ import annotations

import platform
import tempfile
import time
from pathlib import Path

import msgspec

from harness.backends.sim import SimBackend
from harness.invariants import INVARIANTS, Judge
from harness.invariants.file import judge_file
from harness.log import read_log
from harness.operations import Prompt, Submit
from harness.scenario import EngineShape, Scenario
from harness.trial import run_trial

OUTPUT = 1500
ROUNDS = 3


def decoding(folder: Path, *, requests: int, block_size: int) -> Path:
    """A log of so many requests that decode side by side, their lengths a few tokens apart; returns its file."""
    longest = OUTPUT + 100
    shape = EngineShape(
        block_size=block_size,
        num_blocks=requests * (longest // block_size + 2),
        max_model_len=longest,
        max_num_seqs=requests,
        max_num_batched_tokens=8192,
    )
    submits = [Submit(id=f"r{i}", prompt=Prompt(tokens=20 + i % 16, seed=i), max_tokens=OUTPUT - 2 * i) for i in range(requests)]
    backend = SimBackend()
    info = backend.start(shape)
    run_trial(Scenario.from_operations(shape, submits, name="decode"), backend, info, folder)
    return folder / "events.r0.jsonl"


def measure(file: Path) -> tuple[int, float, float]:
    """Tokens in the log, and the seconds of CPU time of the faster round of stepping and of stretches."""
    stepping, stretches, tokens = float("inf"), float("inf"), 0
    for _ in range(ROUNDS):
        began = time.process_time()
        stepped = Judge()
        stepped.feed(read_log(file).entries)
        verdict = stepped.finish()
        stepping = min(stepping, time.process_time() - began)
        began = time.process_time()
        quick = Judge()
        judge_file(file, quick)
        assert quick.finish() == verdict
        stretches = min(stretches, time.process_time() - began)
        tokens = sum(len(request.output) for request in stepped.replay.requests.values())
    return tokens, stepping, stretches


def main() -> None:
    print(f"{platform.platform()}, Python {platform.python_version()}, msgspec {msgspec.__version__}: python benchmarks/replay.py")
    print(f"{len(INVARIANTS)} invariants; reading the file included; CPU time, best of {ROUNDS}")
    for requests, block_size in ((16, 16), (64, 16), (64, 32), (64, 64)):
        with tempfile.TemporaryDirectory() as folder:
            tokens, stepping, stretches = measure(decoding(Path(folder) / "run", requests=requests, block_size=block_size))
        print(
            f"{requests:>3} running, blocks of {block_size}: {tokens / stepping:>9,.0f} tokens/s stepping, "
            f"{tokens / stretches:>9,.0f} with stretches ({stepping / stretches:.1f} times)"
        )


if __name__ == "__main__":
    main()
