"""New weights, seen through a tracer's tokens: what sampled each token, and whether the KV that it read was stale."""

from __future__ import annotations

from harness.backends import CallRefused
from harness.check.promise import Broken, NotCheckable, check, expect
from harness.check.request import Request
from harness.check.stage import Stage
from harness.check.tracing import Tracing, breaks
from harness.events import Mode
from harness.operations import FinishWeightUpdate, Prompt, Resume, StartWeightUpdate, SwapWeights, UpdateWeights, WeightSource
from harness.tracer import Trace

SHARED_PROMPT_TOKENS = 320
NOWHERE = "/nonexistent/caesura-check"


def _other_version(stage: Stage) -> tuple[Tracing, str]:
    tracing = stage.expect_tracing()
    if tracing.other is None:
        raise NotCheckable("there are no other weights to push: name the tracer's folder with --tracer")
    return tracing, tracing.other


async def _push(stage: Stage, version: str) -> None:
    """Push a version, and see it reported."""
    await stage.push(str(stage.expect_tracing().folders[version]), version)
    if (reported := await stage.dialect.weight_version()) is not None:
        expect(reported == version, f"{version} was pushed under its name, and the server reports {reported!r}")


def _read(stage: Stage, request: Request) -> Trace:
    """What a request's tokens tell. Raises Broken for a break of the chain and for a torn update."""
    trace = stage.expect_tracing().trace(request)
    if trace.breaks:
        raise Broken(f"{request.id}: {breaks(trace)}")
    for index, share in enumerate(trace.shares):
        expect(share is None or not share.is_torn, f"{request.id}: token {index} was made by attention weights and a head of two versions")
    return trace


def _expect_versions(request: Request, trace: Trace, boundary: int, old: str, new: str) -> None:
    """Tokens before the boundary are the old version's, those from it on the new one's."""
    expected = [(old, 0, boundary)] * (boundary > 0) + [(new, boundary, len(request.tokens))] * (boundary < len(request.tokens))
    got = [tuple(span) for span in trace.spans]
    expect(got == expected, f"{request.id}: sampled by {got}, expected {expected}")


def _register_crossing(*, clear_cache: bool) -> None:
    id, flag = ("update-keep-clear", "true") if clear_cache else ("update-keep-no-clear", "false")
    says = "no later token reads KV of the old ones" if clear_cache else "the KV of the old ones is kept, as asked"

    @check(id, f"new weights under keep, clear_cache={flag}: tokens change version there, and {says}")
    async def judge(stage: Stage) -> str:
        tracing, other = _other_version(stage)
        requests = await stage.start_frozen(clear_cache=clear_cache)
        boundaries = [len(request.tokens) for request in requests]
        await _push(stage, other)
        late = stage.start(max_tokens=8)
        await stage.resume()
        await stage.over(*requests)
        stage.expect_complete(*requests)
        for request, boundary in zip(requests, boundaries, strict=True):
            trace = _read(stage, request)
            _expect_versions(request, trace, boundary, tracing.version, other)
            _expect_staleness(request, trace, boundary, stale=not clear_cache)
        if not isinstance(late.error, CallRefused):
            await stage.over(late)
            _expect_versions(late, _read(stage, late), 0, tracing.version, other)
        shares = [share.nearest for share in _read(stage, requests[0]).shares[boundaries[0] :] if share is not None]
        seen = f"stale share {shares[0]:g} at the first, {shares[-1]:g} at the last" if not clear_cache else "none read stale KV"
        return f"{tracing.version} up to token {boundaries}, {other} from there to {requests[0].max_tokens}; {seen}"


def _expect_staleness(request: Request, trace: Trace, boundary: int, *, stale: bool) -> None:
    after = [index for index in trace.stale if index >= boundary]
    if stale:
        expect(boundary in after, f"{request.id}: token {boundary} read no KV of the old weights: it was cleared, though not asked for")
        return
    for index in after[:1]:
        share = trace.shares[index]
        assert share is not None, "a stale token has a share"
        raise Broken(f"{request.id}: {len(after)} tokens after the clear read stale KV, token {index} a share of {share.nearest:g}")


for _clear_cache in (True, False):
    _register_crossing(clear_cache=_clear_cache)


def _register_new_requests(mode: Mode) -> None:
    @check(
        f"update-{mode}-clear",
        f"new weights under {mode}, clear_cache=true: later requests are the new weights' alone, cached prompts included",
    )
    async def judge(stage: Stage) -> str:
        tracing, other = _other_version(stage)
        prompt = Prompt(tokens=min(SHARED_PROMPT_TOKENS, stage.dialect.card.max_model_len // 2), seed=2_000_000).token_ids or ()
        await stage.complete(prompt=prompt)
        await stage.start_running(1, seconds=0.5)
        await stage.pause(mode, clear_cache=True)
        await _push(stage, other)
        late = stage.start(max_tokens=8, prompt=prompt)
        await stage.resume()
        requests = [await stage.complete(max_tokens=8, prompt=prompt)]
        if not isinstance(late.error, CallRefused):
            await stage.over(late)
            requests.append(late)
        for request in requests:
            trace = _read(stage, request)
            _expect_versions(request, trace, 0, tracing.version, other)
            _expect_staleness(request, trace, 0, stale=False)
        return f"a prompt of before, sent again {len(requests)} times: {other} alone, and none read stale KV"


for _mode in ("abort", "wait"):
    _register_new_requests(_mode)


@check("update-and-back", "the old weights, pushed again, are the old weights again")
async def there_and_back(stage: Stage) -> str:
    tracing, other = _other_version(stage)
    prompt = Prompt(tokens=64, seed=3_000_000).token_ids or ()
    first = await stage.complete(max_tokens=16, prompt=prompt)
    for version in (other, tracing.version):
        await stage.pause("keep", clear_cache=True)
        await _push(stage, version)
        await stage.resume()
    last = await stage.complete(max_tokens=16, prompt=prompt)
    expect(last.tokens == first.tokens, f"{_read(stage, first).spans} before, {_read(stage, last).spans} afterwards")
    return f"{tracing.version}, {other}, {tracing.version}: the same 16 tokens as before"


@check("update-refused", "weights from a folder that is not there are refused, and change nothing")
async def weights_from_nowhere(stage: Stage) -> str:
    tracing, _ = _other_version(stage)
    label = await stage.dialect.weight_version()
    await stage.pause("keep")
    refusal = await stage.refused(SwapWeights(source=WeightSource(checkpoint=NOWHERE), version="nowhere"))
    expect(refusal is not None, f"weights from {NOWHERE} were taken")
    reported = await stage.dialect.weight_version()
    expect(reported == label, f"refused, and yet the label is {reported!r} now, {label!r} before")
    # Whether the old weights survived is not tried: an engine that lost them dies in its next step, and could not be left as it was found.
    expect(refusal is not None and (refusal.status or 0) < 500, f"{refusal}; expected a status of 400 to 499")
    return f"refused: {refusal}; still {tracing.version}"


def _expect_harmless(stage: Stage) -> None:
    """Some engines die in the first step after a session was opened: it is tried with nobody's request there, and weights to put back."""
    _other_version(stage)
    if not stage.alone:
        raise NotCheckable("somebody else may have requests on the server, which may not survive it")


@check("session-needs-pause", "a weight session cannot be opened unless generation is paused")
async def session_without_a_pause(stage: Stage) -> str:
    _expect_harmless(stage)
    refusal = await stage.refused(StartWeightUpdate())
    expect(refusal is not None, "it was opened, with nothing paused")
    return f"refused: {refusal}"


@check("session-once", "a second weight session cannot be opened, nor one be written or finished that is not open")
async def session_once(stage: Stage) -> str:
    _expect_harmless(stage)
    await stage.pause("keep")
    source = WeightSource(checkpoint=NOWHERE)
    refusals = [await stage.refused(UpdateWeights(source=source)), await stage.refused(FinishWeightUpdate())]
    await stage.call(StartWeightUpdate())
    refusals.append(await stage.refused(StartWeightUpdate()))
    names = ("an update without start", "a finish without start", "a second start")
    taken = [name for name, refusal in zip(names, refusals, strict=True) if refusal is None]
    expect(not taken, f"taken: {', '.join(taken)}")
    for refusal in refusals:
        expect(refusal is None or (refusal.status or 0) < 500, f"{refusal}; expected a status of 400 to 499")
    return "each refused: " + "; ".join(map(str, refusals))


@check("session-holds-pause", "resume is refused while a weight session is open")
async def session_holds_the_pause(stage: Stage) -> str:
    _expect_harmless(stage)
    await stage.pause("keep")
    await stage.call(StartWeightUpdate())
    refusal = await stage.refused(Resume())
    expect(refusal is not None, "resumed, with a weight session open")
    return f"refused: {refusal}"
