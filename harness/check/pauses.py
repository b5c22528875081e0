"""Each pause mode, with and without a clear: what becomes of requests, when the call is answered, and what comes after."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

from harness.check.promise import NotCheckable, check, expect
from harness.check.request import Request
from harness.check.stage import ENOUGH_TOKENS, Stage
from harness.events import Mode
from harness.operations import Pause

LONG_S = 1.0
"""Longer than a call is on its way to be taken up."""
MOST_TO_WAIT = 64
"""So many requests are sent at most to have one wait for a seat."""


async def _abort(stage: Stage, clear_cache: bool) -> str:
    requests = await stage.start_running(3)
    await stage.pause("abort", clear_cache=clear_cache)
    over = [request.is_over for request in requests]
    await stage.expect_quiet(requests, "after the pause was answered")
    for request, was_over in zip(requests, over, strict=True):
        expect(request.is_over, f"{request}, though the pause was answered")
        expect(was_over, f"{request}: its end came after the pause was answered")
        expect(request.finish_reason in ("abort", "length"), f"{request}")
    await stage.resume()
    await stage.complete()
    return f"{_ends(requests)} when the call was answered; nothing came after it"


async def _wait(stage: Stage, clear_cache: bool) -> str:
    requests = await stage.start_running(3)
    await stage.pause("wait", clear_cache=clear_cache)
    for request in requests:
        expect(request.is_over, f"{request}, though the pause was answered")
    stage.expect_complete(*requests)
    await stage.resume()
    await stage.complete()
    return f"{_ends(requests)} when the call was answered"


async def _keep(stage: Stage, clear_cache: bool) -> str:
    requests = await stage.start_frozen(3, clear_cache=clear_cache)
    frozen = [len(request.tokens) for request in requests]
    await stage.resume()
    await stage.over(*requests)
    stage.expect_complete(*requests)
    return f"frozen at {frozen} tokens, nothing came, and after resume all {requests[0].max_tokens} of each"


Carry = Callable[[Stage, bool], Awaitable[str]]
MODES: dict[Mode, tuple[Carry, str]] = {
    "abort": (_abort, "ends every request as aborted, before it is answered"),
    "wait": (_wait, "is answered when every request has run to its end"),
    "keep": (_keep, "freezes requests; after resume they go on, nothing lost or doubled"),
}


def _register(mode: Mode, carry: Carry, says: str, *, clear_cache: bool) -> None:
    words = "clear" if clear_cache else "no-clear"

    @check(f"pause-{mode}-{words}", f"a pause by {mode}, clear_cache={str(clear_cache).lower()}, {says}; then nothing runs until resume")
    async def judge(stage: Stage) -> str:
        return await carry(stage, clear_cache)


for _mode, (_carry, _says) in MODES.items():
    for _clear_cache in (True, False):
        _register(_mode, _carry, _says, clear_cache=_clear_cache)


@check("wait-includes-waiting", "a pause by wait also runs those to their end that were still waiting for a seat")
async def requests_without_a_seat_run_too(stage: Stage) -> str:
    requests = await _start_until_one_waits(stage)
    silent = [request for request in requests if not request.tokens]
    await stage.pause("wait")
    unfinished = [request for request in requests if not request.is_over]
    expect(
        not unfinished, f"answered while {len(unfinished)} of {len(requests)} requests had not ended: {', '.join(map(str, unfinished[:2]))}"
    )
    stage.expect_complete(*requests)
    return f"{len(requests)} requests, {len(silent)} of them without a token when it was asked, all ran to their end"


async def _start_until_one_waits(stage: Stage) -> list[Request]:
    """Requests of which at least one has no seat. Raises NotCheckable."""
    if (await stage.metrics()).waiting is None:
        raise NotCheckable("the server does not show who waits: /metrics has no such count")
    requests: list[Request] = []
    while len(requests) < MOST_TO_WAIT:
        requests += [stage.start(seconds=3.0) for _ in range(max(8, len(requests)))]
        await stage.heard(requests[0], ENOUGH_TOKENS)
        # A request that has just come waits for the next step, too; one without a seat still does after several.
        await stage.some_steps()
        if (await stage.metrics()).waiting and any(not request.tokens for request in requests):
            return requests
    raise NotCheckable(f"none of {len(requests)} requests had to wait for a seat")


@check("is-paused-follows", "is_paused is false while running, true from the moment that a pause is taken up, false after resume")
async def the_flag_follows(stage: Stage) -> str:
    running = await stage.is_paused()
    requests = await stage.start_running(seconds=2 * LONG_S)
    mode: Mode = "wait" if stage.backend.cannot(Pause(mode="wait")) is None else "keep"
    began = time.monotonic()
    pause = await stage.pause_later(mode)
    pending, seconds = not pause.done(), time.monotonic() - began
    if mode == "wait":
        await stage.over(*requests)
    expect((came := await pause) == "paused", came)
    paused = await stage.is_paused()
    await stage.resume()
    seen = [running, paused, await stage.is_paused()]
    expect(seen == [False, True, False], f"running, paused, resumed: {seen}")
    expect(pending or seconds < LONG_S, f"false for {seconds:.1f} s, in which a pause by {mode} was pending")
    return "false, " + ("true while a wait was pending, " if pending else "") + "true, false after resume"


@check("sleep-flag", "is_sleeping is true while something is asleep, and not when merely paused")
async def pausing_is_not_sleeping(stage: Stage) -> str:
    await stage.pause()
    expect(not await stage.is_sleeping(), "is_sleeping is true under a pause, with nothing asleep")
    return "false under a pause"


@check("sleep-keeps-pause", "a pause survives a sleep and its wake-up")
async def a_pause_survives_sleep(stage: Stage) -> str:
    requests = await stage.start_frozen()
    await stage.sleep_and_wake()
    expect(await stage.is_paused(), "sleep (level 0) and wake_up ended the pause that was there before")
    await stage.expect_quiet(requests, "after sleep and wake_up, under the pause of before")
    return "still paused after sleep (level 0) and wake_up"


def _ends(requests: list[Request]) -> str:
    counts = ", ".join(str(len(request.tokens)) for request in requests)
    reasons = sorted({str(request.finish_reason) for request in requests})
    return f"{len(requests)} requests had ended ({', '.join(reasons)}) after {counts} tokens"
