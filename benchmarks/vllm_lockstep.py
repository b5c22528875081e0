"""Steps per second of vLLM alone and with the model following, in one process, on one engine.

    python benchmarks/vllm_lockstep.py [vllm-scheduler] [vllm]

Raw is vLLM's own `LLMEngine.step` on the same requests, nothing watched. Compared is the backend's step, the model's
explanation of its events and the comparison of the whole state after each. Rounds of the two alternate; medians. Seconds
are those of the processor, which is what a quiet machine's clock would show and repeats on a busy one.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time

from harness.backends import Backend, make_backend
from harness.conformance import Explainer
from harness.events import Called, Entry, Event
from harness.operations import Operation, Prompt, Submit, to_data
from harness.scenario import EngineShape
from harness.trial import opened_event

SHAPE = EngineShape(block_size=32, num_blocks=64, max_model_len=512, max_num_seqs=4, max_num_batched_tokens=256)
REQUESTS, TOKENS, ROUNDS = 4, 150, 5


def submissions() -> list[Operation]:
    return [Submit(id=f"r{number}", prompt=Prompt(tokens=20, seed=number), max_tokens=TOKENS) for number in range(REQUESTS)]


def raw(backend: Backend) -> float:
    """Steps a second of vLLM itself: the scheduler is one without the adapter's wrappers."""
    backend.start(SHAPE)
    for op, operation in enumerate(submissions()):
        backend.apply(op, operation)
    unwatched = [thing for thing in _watched(backend._scheduler)]  # type: ignore[attr-defined]
    for thing, name in unwatched:
        delattr(thing, name)
    llm, steps = backend._llm, 0  # type: ignore[attr-defined]
    began = time.process_time()
    while backend.has_work():
        llm.step()
        steps += 1
    rate = steps / (time.process_time() - began)
    backend.stop()
    return rate


def _watched(scheduler) -> list[tuple[object, str]]:
    """Every method that was wrapped, with the object on which it was."""
    pool = scheduler.kv_cache_manager.block_pool
    things = (scheduler, scheduler.kv_cache_manager, pool, pool.free_block_queue)
    return [(thing, name) for thing in things for name, value in list(vars(thing).items()) if getattr(value, "__name__", "") == "watched"]


def compared(backend: Backend) -> float:
    """Steps a second with the model following."""
    explainer, seq = Explainer(), 0
    info = backend.start(SHAPE)

    def follow(*events: Event) -> None:
        nonlocal seq
        explainer.feed([Entry(seq + place, 0, "r0", event) for place, event in enumerate(events)])
        seq += len(events)

    follow(opened_event(SHAPE, backend, info, digest="", seed=0))
    for op, operation in enumerate(submissions()):
        follow(Called(op=op, operation=to_data(operation), by="benchmark"), *backend.apply(op, operation))
    steps, began = 0, time.process_time()
    while backend.has_work():
        follow(*backend.step())
        explainer.compare_state(backend.state())
        steps += 1
    rate = steps / (time.process_time() - began)
    assert explainer.mismatch is None, explainer.mismatch
    backend.stop()
    return rate


def main() -> None:
    print(f"{platform.platform()}; Python {platform.python_version()}")
    print(f"command: python benchmarks/vllm_lockstep.py; {REQUESTS} requests, {TOKENS} tokens each, {ROUNDS} rounds")
    for name in sys.argv[1:] or ("vllm-scheduler", "vllm"):
        backend = make_backend(name)
        rates = [(raw(backend), compared(backend)) for _ in range(ROUNDS)]
        alone, followed = (statistics.median(column) for column in zip(*rates, strict=True))
        version = backend.start(SHAPE).versions["vllm"]
        backend.stop()
        print(f"{name} {version}: raw {alone:,.0f} steps/s, compared {followed:,.0f} steps/s, {followed / alone:.0%}")


if __name__ == "__main__":
    main()
