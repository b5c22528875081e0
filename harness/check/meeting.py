"""Control calls that meet: one over another that is pending, or that has taken effect."""

from __future__ import annotations

import asyncio

from harness.check.promise import NotCheckable, check, expect
from harness.check.request import Request
from harness.check.stage import Stage


@check("pause-again", "the same pause again is answered at once, and one resume ends both")
async def again(stage: Stage) -> str:
    requests = await stage.start_frozen()
    await stage.pause("keep")
    await stage.expect_quiet(requests, "under a repeated pause")
    await stage.resume()
    expect(not await stage.is_paused(), "still paused after two pauses and one resume")
    await stage.over(*requests)
    stage.expect_complete(*requests)
    return "answered; running after one resume"


@check("resume-again", "resume while running does nothing")
async def resume_while_running(stage: Stage) -> str:
    requests = await stage.start_running()
    await stage.resume()
    await stage.resume()
    await stage.over(*requests)
    stage.expect_complete(*requests)
    return "answered, and requests ran on to their end"


@check("abort-over-keep", "a pause by abort, while paused by keep, ends the frozen requests")
async def abort_over_keep(stage: Stage) -> str:
    requests = await stage.start_frozen()
    await stage.pause("abort")
    await stage.over(*requests)
    for request in requests:
        expect(request.finish_reason == "abort", f"{request}, expected it to be aborted")
    return f"{len(requests)} frozen requests ended as aborted"


@check("wait-over-keep", "a pause by wait, while paused by keep, runs the frozen requests to their end")
async def wait_over_keep(stage: Stage) -> str:
    requests = await stage.start_frozen(clear_cache=False)
    await stage.pause("wait", clear_cache=False)
    for request in requests:
        expect(request.is_over, f"{request}, though the second pause was answered")
    stage.expect_complete(*requests)
    expect(await stage.is_paused(), "no longer paused")
    return f"{len(requests)} frozen requests ran to their end; still paused"


@check("keep-over-wait", "a pause by keep, while one by wait is pending, freezes requests, and the wait call fails")
async def keep_over_wait(stage: Stage) -> str:
    requests, wait = await _pending_wait(stage)
    await stage.pause("keep")
    await stage.expect_quiet(requests, "after the pause by keep was answered")
    unfinished = [request for request in requests if not request.is_over]
    if not unfinished:
        raise NotCheckable("requests had ended before the second call")
    came = await wait
    expect(came != "paused", f"the wait call was answered with success while {len(unfinished)} requests were frozen, {unfinished[0]}")
    return f"frozen; the wait call: {came}"


@check("abort-over-wait", "a pause by abort, while one by wait is pending, ends every request, and both calls succeed")
async def abort_over_wait(stage: Stage) -> str:
    requests, wait = await _pending_wait(stage)
    await stage.pause("abort")
    await stage.over(*requests)
    expect((came := await wait) == "paused", f"the wait call: {came}")
    aborted = [request for request in requests if request.finish_reason == "abort"]
    if not aborted:
        raise NotCheckable("requests had ended before the second call")
    return f"{len(aborted)} requests ended as aborted; both calls succeeded"


@check("resume-over-wait", "resume, while a pause by wait is pending, lets requests run on, and the pause call fails")
async def resume_over_wait(stage: Stage) -> str:
    requests, wait = await _pending_wait(stage)
    await stage.resume()
    if all(request.is_over for request in requests):
        raise NotCheckable("requests had ended before the second call")
    expect(not await stage.is_paused(), "still paused after resume")
    await stage.over(*requests)
    stage.expect_complete(*requests)
    expect((came := await wait) != "paused", "the pause call was answered with success, though a resume had overridden it")
    return f"requests ran on; the pause call: {came}"


async def _pending_wait(stage: Stage) -> tuple[list[Request], asyncio.Task[str]]:
    """Running requests, and a pause by wait for them."""
    requests = await stage.start_running(seconds=1.5)
    wait = await stage.pause_later("wait")
    if wait.done():
        raise NotCheckable(f"the pause by wait came back before another call could meet it: {wait.result()}")
    return requests, wait
