"""The host tier: which evicted blocks get a slot, which copies come back, and which are lost."""

from __future__ import annotations

import pytest
import torch

from engine import CacheBusy, EngineCore, SamplingParams
from engine.attention import KVCache, LayerShape
from engine.host_tier import BlockCopy, HostTier

A, B, C, D = b"a", b"b", b"c", b"d"


def test_slots_are_filled_from_the_lowest_and_then_the_least_recently_used_one_is_given_up():
    tier = HostTier(2)
    assert [tier.offload(digest, keep=()) for digest in (A, B)] == [0, 1]
    tier.use([0])
    assert tier.offload(C, keep=()) == 1
    assert (A in tier, B in tier, C in tier) == (True, False, True)
    assert tier.slots == (0, 1)


def test_copies_that_are_to_be_kept_are_not_given_up():
    tier = HostTier(2)
    tier.offload(A, keep=())
    tier.offload(B, keep=())
    assert tier.offload(C, keep=(0,)) == 1
    assert tier.offload(D, keep=(0, 1)) is None
    assert D not in tier


def test_a_lookup_stops_at_the_first_digest_without_a_copy():
    tier = HostTier(3)
    for digest in (A, C):
        tier.offload(digest, keep=())
    assert tier.find([A, B, C]) == (0,)
    assert tier.find([B]) == ()


def test_a_cleared_tier_is_empty_and_starts_again_at_its_first_slot():
    tier = HostTier(2)
    tier.offload(A, keep=())
    tier.clear()
    assert tier.is_empty and tier.find([A]) == ()
    assert tier.offload(B, keep=()) == 0


def test_copies_are_carried_out_one_after_the_other():
    cache = KVCache(
        {0: LayerShape((1, 1), (1, 1))}, num_blocks=2, block_size=2, dtype=torch.float32, device=torch.device("cpu"), host_blocks=1
    )
    cache.keys[0][:, 0, 0] = torch.tensor([1.0, 2, 3, 4])
    cache.copy_blocks([BlockCopy("host", 0, 0), BlockCopy("device", 1, 0)])
    assert cache.keys[0].flatten().tolist() == [1, 2, 1, 2]
    assert cache.host_keys[0].flatten().tolist() == [1, 2]


# ---- in an engine ----

LONG = list(range(40, 53))


def run(engine: EngineCore, request_id: str, prompt: list[int]) -> tuple[int, ...]:
    engine.submit(request_id, prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    while engine.has_work():
        engine.step()
    return sum((output.token_ids for output in engine.take_outputs()), ())


def test_timeline_of_a_prefix_that_is_evicted_and_comes_back(make_engine, recorder):
    engine = make_engine(num_blocks=4, host_blocks=4, max_num_batched_tokens=32, observer=recorder)
    first = run(engine, "a", LONG)
    run(engine, "b", list(range(80, 93)))
    recorder.take()
    assert run(engine, "c", LONG) == first
    assert recorder.take()[:6] == [
        "accepted c parked=False",
        "allocated c [0 1 2 3] evicted=[1 2 3]",
        "offloaded [[1 3] [2 3] [3 3]]",  # the other slots are being loaded
        "loaded c [[2 0] [1 1] [0 2]]",
        "stored c 0:0 1:1 2:2",
        "admitted c life=1 num_computed_tokens=12",
    ]


def test_a_clear_clears_the_host_too_and_says_so(make_engine, recorder):
    engine = make_engine(num_blocks=4, host_blocks=4, max_num_batched_tokens=32, observer=recorder)
    run(engine, "a", LONG)
    run(engine, "b", list(range(80, 93)))
    assert not engine.scheduler.host.is_empty
    engine.reset_prefix_cache()
    assert recorder.take()[-2:] == ["cleared success=True empty=True", "cleared success=True empty=True tier=host"]
    assert engine.scheduler.host.is_empty
    recorder.take()
    run(engine, "c", LONG)
    assert not any(line.startswith(("hit", "loaded")) for line in recorder.take())


def test_a_refused_reset_touches_no_tier(make_engine, recorder):
    engine = make_engine(num_blocks=4, host_blocks=4, max_num_batched_tokens=32, observer=recorder)
    run(engine, "a", LONG)
    run(engine, "b", list(range(80, 93)))
    copies = engine.scheduler.host.slots
    engine.submit("c", LONG, SamplingParams(max_tokens=3))
    engine.step()
    recorder.take()
    with pytest.raises(CacheBusy):
        engine.reset_prefix_cache()
    assert [line for line in recorder.take() if line.startswith("cleared")] == ["cleared success=False empty=False"]
    assert set(copies) <= set(engine.scheduler.host.slots)
