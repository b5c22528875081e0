"""Requests that come under a pause, and aborts, in whatever state a request is."""

from __future__ import annotations

import asyncio
from collections import Counter

from harness.backends import CallRefused
from harness.backends.http.contract import ContractDialect
from harness.check.promise import Broken, NotCheckable, check, expect
from harness.check.request import Request
from harness.check.stage import ENOUGH_TOKENS, QUIET_S, Stage
from harness.events import Mode
from harness.operations import Abort, Prompt, Submit

MODES: tuple[Mode, ...] = ("keep", "abort", "wait")


def _register(mode: Mode) -> None:
    @check(f"late-{mode}", f"a request that comes under a pause by {mode} is refused at once (503), or waits and is served after resume")
    async def judge(stage: Stage) -> str:
        await stage.pause(mode)
        late = stage.start(max_tokens=8)
        await stage.expect_quiet([late], "under a pause")
        if isinstance(late.error, CallRefused):
            expect(late.error.status == 503, f"refused with {late.error.status}, expected 503: {late.error}")
            stage.late_policies[mode] = "refused"
            return f"refused: {late.error}"
        expect(not late.is_over, f"{late}, under a pause")
        await stage.resume()
        await stage.over(late)
        stage.expect_complete(late)
        stage.late_policies[mode] = "waits"
        return "waited in silence, then ran to its end"


for _mode in MODES:
    _register(_mode)


@check("late-alike", "late requests meet one policy, whatever the mode of the pause")
async def one_policy(stage: Stage) -> str:
    policies = stage.late_policies
    if len(policies) < 2:
        raise NotCheckable("what becomes of late requests was seen under fewer than two modes")
    expect(len(set(policies.values())) == 1, ", ".join(f"{mode}: {policy}" for mode, policy in policies.items()))
    return ", ".join(f"{mode}: {policy}" for mode, policy in policies.items())


@check("abort-running", "an abort by id ends that request and no other, and its count says one")
async def abort_running(stage: Stage) -> str:
    victim, other = await stage.start_running()
    count = await stage.abort(victim)
    await _expect_aborted(stage, victim, count)
    await stage.over(other)
    stage.expect_complete(other)
    return f"{victim}; the other ran to its end"


@check("abort-frozen", "an abort by id ends a request that a pause froze, while paused")
async def abort_frozen(stage: Stage) -> str:
    victim, other = await stage.start_frozen()
    count = await stage.abort(victim)
    await _expect_aborted(stage, victim, count)
    await stage.resume()
    await stage.over(other)
    stage.expect_complete(other)
    return f"{victim}, under the pause; the other went on after resume"


@check("abort-late", "an abort by id ends a request that came under a pause, while paused")
async def abort_late(stage: Stage) -> str:
    await stage.pause("keep")
    late = stage.start(max_tokens=8)
    await stage.expect_quiet([late], "under a pause")
    if isinstance(late.error, CallRefused):
        raise NotCheckable("late requests are refused here")
    await _expect_aborted(stage, late, await stage.abort(late))
    return f"{late}, under the pause"


@check("abort-all", "an abort of all ends every request, and its count says how many")
async def abort_all(stage: Stage) -> str:
    if not stage.alone:
        raise NotCheckable("somebody else may have requests on the server")
    requests = await stage.start_running(3)
    count = (await stage.call(Abort(ids="all"))).get("aborted")
    await stage.over(*requests)
    aborted = [request for request in requests if request.finish_reason == "abort"]
    expect(len(aborted) == 3, f"{len(aborted)} of 3 requests were aborted")
    expect(count in (None, 3), f"the answer says {count}, 3 were running")
    return f"{len(aborted)} requests ended as aborted"


@check("abort-unknown", "an abort of an id that is not live changes nothing, and its count says 0")
async def abort_unknown(stage: Stage) -> str:
    done = await stage.complete()
    other = (await stage.start_running(1))[0]
    counts = [(await stage.call(Abort(ids=("nobody",)))).get("aborted"), await stage.abort(done)]
    await stage.over(other)
    stage.expect_complete(other)
    if counts == [None, None]:
        raise NotCheckable("the answers have no count; requests were not harmed")
    expect(counts == [0, 0], f"an id that never was, and one that has ended: aborted {counts}, expected [0, 0]")
    return "an id that never was, and one that has ended: aborted 0; a running request was not harmed"


@check("hang-up", "a client that hangs up has its request aborted")
async def hang_up(stage: Stage) -> str:
    if (await stage.metrics()).running is None:
        raise NotCheckable("the server does not show how many requests run: /metrics has no such count")
    if not stage.alone:
        raise NotCheckable("somebody else may have requests on the server")
    max_tokens = stage.tokens_for(60)
    left_s = (max_tokens - ENOUGH_TOKENS) * stage.token_s
    if left_s < 4 * QUIET_S:
        raise NotCheckable(f"a request as long as the model allows is over in {left_s:.1f} s, too soon to tell an abort from its end")
    generation = stage.dialect.submit(Submit(id="caesura-hang-up", prompt=Prompt(tokens=(16, 17)), max_tokens=max_tokens, ignore_eos=True))
    async with stage.client.stream(generation.path, generation.body, headers=generation.headers) as events, asyncio.timeout(stage.bound_s):
        heard = 0
        async for event in events:
            heard += len(stage.dialect.read(event, heard).tokens)
            if heard >= ENOUGH_TOKENS:
                break
    seconds = await stage.until_none_runs(within_s=min(stage.bound_s, left_s / 2))
    return f"gone from the counters after {seconds:.2f} s; it had {left_s:.1f} s to go"


@check("abort-children", "an abort of a request with n=2 ends both of its choices, and leaves nothing behind")
async def abort_children(stage: Stage) -> str:
    dialect = stage.dialect
    if not isinstance(dialect, ContractDialect) or not dialect.has("/abort_requests"):
        raise NotCheckable("this server has no /abort_requests")
    id = "caesura-pair"
    body = {"model": dialect.card.model, "prompt": [16, 17], "n": 2, "max_tokens": stage.tokens_for(60), "stream": True, "ignore_eos": True}
    heard, ends = Counter[int](), dict[int, str]()
    aborted = False
    try:
        async with stage.client.stream("/v1/completions", body, headers={"X-Request-Id": id}) as events, asyncio.timeout(stage.bound_s):
            async for event in events:
                for choice in event["choices"]:
                    heard[choice["index"]] += 1
                    if choice["finish_reason"]:
                        ends[choice["index"]] = choice["finish_reason"]
                if not aborted and min(heard[0], heard[1]) >= ENOUGH_TOKENS:
                    aborted = True
                    await stage.client.post("/abort_requests", {"request_ids": [f"cmpl-{id}-0"]})
    except TimeoutError:
        raise Broken(f"its choices ended as {ends} within {stage.bound_s:g} s, {'after' if aborted else 'before'} the abort") from None
    expect(ends == {0: "abort", 1: "abort"}, f"its choices ended as {ends}, after {heard[0]} and {heard[1]} events")
    if stage.alone:
        left = (await stage.call(Abort(ids="all"))).get("aborted")
        expect(not left, f"both choices ended as aborted, and an abort of all then finds {left} more request: the parent was not let go")
    return "both choices ended as aborted"


async def _expect_aborted(stage: Stage, request: Request, count: int | None) -> None:
    try:
        await stage.over(request)
    except Broken as late:
        raise Broken(f"{late}, though the abort was answered") from None
    expect(request.finish_reason == "abort", f"{request}, expected it to be aborted")
    expect(count in (None, 1), f"the answer says aborted {count}, expected 1")
