"""A training loop in miniature against a vLLM server, which knows nothing of Caesura; docs/attach.md records what it does.

    python examples/attach_loop.py http://localhost:8000 CHECKPOINT CHECKPOINT ...

Rollouts are generated all the time. Every so often generation is paused, the next checkpoint's weights are loaded, and generation
goes on: requests in the middle of their tokens are frozen (`keep`) and their KV cache is computed again (`clear_cache`).
"""

from __future__ import annotations

import asyncio
import itertools
import sys

import httpx

WORKERS, TOKENS, BETWEEN_S = 4, 48, 0.5


async def rollouts(server: httpx.AsyncClient, worker: int, finished: list[int]) -> None:
    """One request after the other."""
    for number in itertools.count():
        prompt = [3 + (worker * 7 + number + place) % 50 for place in range(16)]
        body = {"model": "policy", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        answer = (await server.post("/v1/completions", json=body)).raise_for_status().json()
        finished.append(answer["usage"]["completion_tokens"])


async def update(server: httpx.AsyncClient, checkpoint: str, version: str) -> None:
    """New weights, between two tokens of whatever is running."""

    async def post(path: str, **body) -> None:
        (await server.post(path, json=body)).raise_for_status()

    await post("/pause?mode=keep&clear_cache=true")
    await post("/collective_rpc", method="reload_weights", kwargs={"weights_path": checkpoint})
    await post("/update_weight_version", new_version=version)
    await post("/resume")


async def train(url: str, checkpoints: list[str]) -> None:
    finished: list[int] = []
    async with httpx.AsyncClient(base_url=url, timeout=60) as server:
        workers = [asyncio.create_task(rollouts(server, worker, finished)) for worker in range(WORKERS)]
        for step, checkpoint in enumerate(checkpoints, start=1):
            await asyncio.sleep(BETWEEN_S)
            await update(server, checkpoint, f"step-{step}")
            print(f"step {step}: {len(finished)} rollouts, {sum(finished)} tokens")
        await asyncio.sleep(BETWEEN_S)
        for task in workers:
            task.cancel()
        await asyncio.gather(*workers, return_exceptions=True)


if __name__ == "__main__":
    asyncio.run(train(sys.argv[1], sys.argv[2:]))
