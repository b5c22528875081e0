"""Version labels: where they may be set, what they say, and whether a request's tokens carry the right ones."""

from __future__ import annotations

from harness.check.promise import NotCheckable, check, expect
from harness.check.request import Request
from harness.check.stage import Stage
from harness.operations import UpdateWeightVersion

LABEL = "caesura-check"


@check("label-set", "under a pause the version label can be set, and is what the server then reports")
async def label_under_a_pause(stage: Stage) -> str:
    await stage.pause()
    await stage.set_version(LABEL)
    reported = await stage.dialect.weight_version()
    expect(reported == LABEL, f"set to {LABEL!r}, reported {reported!r}")
    return f"set to {LABEL!r}, and reported"


@check("label-needs-pause", "the version label cannot be set while generation runs")
async def label_while_running(stage: Stage) -> str:
    requests = await stage.start_running()
    before = await stage.dialect.weight_version()
    refusal = await stage.refused(UpdateWeightVersion(version=LABEL))
    reported = await stage.dialect.weight_version()
    expect(refusal is not None, f"set to {LABEL!r} beside {len(requests)} running requests")
    expect(reported == before, f"refused, and yet the label is {reported!r} now, {before!r} before")
    return f"refused: {refusal}"


@check("label-spans", "the version spans of a request partition its output, and change where the label did")
async def spans_across_a_label(stage: Stage) -> str:
    before = await stage.dialect.weight_version()
    (request,) = await stage.start_frozen(1, clear_cache=False)
    boundary = len(request.tokens)
    await stage.set_version(LABEL)
    await stage.resume()
    await stage.over(request)
    spans = spans_of(request)
    expected = [(before, 0, boundary), (LABEL, boundary, len(request.tokens))]
    expect(spans == expected, f"expected {expected}, got {spans}")
    return f"{spans}"


def spans_of(request: Request) -> list[tuple[str, int, int]]:
    """Those that came with its end. Raises NotCheckable if there were none."""
    if request.spans is None:
        raise NotCheckable("the server reports no version spans (vLLM does over /inference/v1/generate: --enable-scale-out)")
    return request.spans
