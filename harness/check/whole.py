"""What must hold of everything that was heard: judged last, over all requests of all checks."""

from __future__ import annotations

from harness.backends import CallRefused
from harness.check.promise import NotCheckable, check, expect
from harness.check.stage import Stage
from harness.check.tracing import breaks
from harness.check.versions import spans_of


@check("tokens-conserved", "tokens delivered are the sampled sequence: none lost, doubled or shifted")
async def tokens_conserved(stage: Stage) -> str:
    tracing, heard = stage.expect_tracing(), [request for request in stage.requests if request.tokens]
    broken = [(request, trace) for request in heard if (trace := tracing.trace(request)).breaks]
    expect(not broken, "; ".join(f"{request.id}: {breaks(trace)}" for request, trace in broken[:3]))
    return f"{sum(len(request.tokens) for request in heard):,} tokens of {len(heard)} requests form unbroken chains"


@check("labels-true", "the version that a request reports for a token is that of the weights which sampled it")
async def labels_true(stage: Stage) -> str:
    tracing, reported = stage.expect_tracing(), [request for request in stage.requests if request.spans and request.tokens]
    if not reported:
        raise NotCheckable("no request came back with version spans")
    for request in reported:
        names = {label: tracing.version for label, _, _ in request.spans or () if label not in tracing.folders}
        wrong = tracing.trace(request).mislabelled(request.spans or (), names)
        told = "; ".join(f"tokens {start} to {end}: reported {claimed}, sampled by {traced}" for start, end, claimed, traced in wrong)
        expect(not wrong, f"{request.id}: {told}")
    return f"those of {len(reported)} requests"


@check("spans-partition", "the version spans of every request partition its output")
async def spans_partition(stage: Stage) -> str:
    reported = [request for request in stage.requests if request.spans is not None and request.tokens]
    if not reported:
        raise NotCheckable("no request came back with version spans")
    for request in reported:
        spans = spans_of(request)
        starts, ends = [start for _, start, _ in spans], [end for _, _, end in spans]
        whole = starts == [0, *ends[:-1]] and ends[-1:] == [len(request.tokens)] and all(s < e for s, e in zip(starts, ends, strict=True))
        expect(whole, f"{request}: {spans}")
    return f"those of {len(reported)} requests"


@check("counts-true", "a request reports as many tokens as were delivered")
async def counts_true(stage: Stage) -> str:
    counted = [(request, count) for request in stage.requests if (count := (request.answer or {}).get("output_tokens")) is not None]
    if not counted:
        raise NotCheckable("no request came back with a count of its tokens")
    for request, count in counted:
        expect(count == len(request.tokens), f"{request}, and reports {count}")
    return f"those of {len(counted)} requests"


@check("one-ending", "every request comes back once, with a reason")
async def one_ending(stage: Stage) -> str:
    for request in stage.requests:
        expect(request.is_over and (request.error is None or isinstance(request.error, CallRefused)), f"{request}")
    return f"{len(stage.requests)} requests"
