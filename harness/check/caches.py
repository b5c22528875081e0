"""The prefix cache as its counters show it: what a pause or a reset cleared, and what it left."""

from __future__ import annotations

from harness.backends import CallRefused
from harness.check.promise import NotCheckable, check, expect
from harness.check.stage import Stage
from harness.operations import Prompt, ResetPrefixCache

PROMPT_TOKENS = 320
"""More than one block of any engine; shorter where the model's length has no room for it."""


async def _hits_of(stage: Stage, prompt: tuple[int, ...]) -> float:
    """How many of the prompt's tokens were found in the prefix cache, as the counter moves while it runs alone."""
    before = (await stage.metrics()).hits
    request = await stage.complete(prompt=prompt)
    cached = (request.answer or {}).get("cached_tokens")
    after = (await stage.metrics()).hits
    if cached is not None:
        return float(cached)
    assert before is not None and after is not None, "asked for before"
    return after - before


async def _cached_prompt(stage: Stage, seed: int) -> tuple[int, ...]:
    """A prompt that is in the cache. Raises NotCheckable where there is no such cache."""
    tokens = min(PROMPT_TOKENS, stage.dialect.card.max_model_len // 2)
    if (await stage.metrics()).hits is None and not any("cached_tokens" in (request.answer or {}) for request in stage.requests):
        raise NotCheckable("the server does not show hits in its prefix cache, neither in /metrics nor with a request")
    prompt = Prompt(tokens=tokens, seed=1_000_000 + seed).token_ids or ()
    await stage.complete(prompt=prompt)
    if not await _hits_of(stage, prompt):
        raise NotCheckable(
            f"a prompt of {tokens} tokens that came twice was not found in the prefix cache: it is off, or its blocks are longer"
        )
    return prompt


async def _expect_gone(stage: Stage, prompt: tuple[int, ...]) -> str:
    hits = await _hits_of(stage, prompt)
    expect(hits == 0, f"{hits:g} of {len(prompt)} tokens of an earlier prompt were found in the cache afterwards")
    return "an earlier prompt was not found in the cache afterwards"


@check("clear-clears", "clear_cache=true leaves nothing in the prefix cache")
async def clear_clears(stage: Stage) -> str:
    prompt = await _cached_prompt(stage, 1)
    await stage.pause("keep", clear_cache=True)
    await stage.resume()
    return await _expect_gone(stage, prompt)


@check("no-clear-keeps", "clear_cache=false keeps the prefix cache")
async def no_clear_keeps(stage: Stage) -> str:
    prompt = await _cached_prompt(stage, 2)
    await stage.pause("keep", clear_cache=False)
    await stage.resume()
    hits = await _hits_of(stage, prompt)
    expect(hits > 0, f"nothing of an earlier prompt of {len(prompt)} tokens was found in the cache afterwards")
    return f"{hits:g} of {len(prompt)} tokens of an earlier prompt were found in the cache afterwards"


@check("clear-later", "a second pause with clear_cache=true clears, if the first did not")
async def clear_later(stage: Stage) -> str:
    prompt = await _cached_prompt(stage, 3)
    await stage.pause("keep", clear_cache=False)
    await stage.pause("keep", clear_cache=True)
    await stage.resume()
    return await _expect_gone(stage, prompt)


@check("reset-idle", "reset_prefix_cache on an idle server empties the prefix cache")
async def reset_idle(stage: Stage) -> str:
    prompt = await _cached_prompt(stage, 4)
    await stage.reset_prefix_cache()
    hits = await _hits_of(stage, prompt)
    expect(hits == 0, f"answered with success, and {hits:g} of {len(prompt)} tokens of an earlier prompt were found afterwards")
    return "an earlier prompt was not found in the cache afterwards"


@check("reset-frozen", "reset_prefix_cache under a pause takes the blocks of frozen requests, which are computed again after resume")
async def reset_frozen(stage: Stage) -> str:
    requests = await stage.start_frozen(clear_cache=False)
    try:
        await stage.reset_prefix_cache()
    except CallRefused as refusal:
        expect(False, f"refused: {refusal}")
    await stage.resume()
    await stage.over(*requests)
    stage.expect_complete(*requests)
    return f"answered; {len(requests)} frozen requests went on to their end"


@check("reset-running", "reset_prefix_cache beside running requests does not report a success that it did not have")
async def reset_running(stage: Stage) -> str:
    prompt = await _cached_prompt(stage, 5)
    requests = await stage.start_running()
    refusal = await stage.refused(ResetPrefixCache())
    running = [request for request in requests if not request.is_over]
    await stage.over(*requests)
    stage.expect_complete(*requests)
    if refusal is not None:
        return f"refused: {refusal}"
    hits = await _hits_of(stage, prompt)
    expect(
        hits == 0,
        f"answered with success beside {len(running)} running requests, and {hits:g} tokens of an earlier prompt were found afterwards",
    )
    return "answered, and an earlier prompt was not found in the cache afterwards"
