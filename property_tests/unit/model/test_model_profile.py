"""Each field of a profile, with both of its values; and finding profiles by name."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.events import Delivered, Finished, Freed, Landed, Launched, PauseEffective, PausePending, Received, Returned, Scheduled
from harness.model import CAESURA, Profile

EMPTY_STEPS = replace(CAESURA, name="empty steps", empty_steps=True)
WAIT_ADMITS_NOBODY = replace(CAESURA, name="wait admits nobody", wait_admits_waiting=False)
FREED_TO_TAIL = replace(CAESURA, name="freed to the tail", uncached_freed_to="tail")


def test_a_profile_is_found_by_name():
    assert Profile.named("caesura") is CAESURA


def test_an_unknown_name_is_an_error_that_lists_the_known_ones():
    with pytest.raises(ValueError, match="got profile 'vllm-9', expected one of: caesura"):
        Profile.named("vllm-9")


def test_without_empty_steps_the_last_end_is_the_last_step(engine):
    engine = engine()
    engine.submit("r1", (1,), max_tokens=1)
    engine.step()
    assert not engine.model.has_work()


def test_with_empty_steps_one_more_follows_each_finish_and_abort(engine):
    engine = engine(profile=EMPTY_STEPS)
    engine.submit("r1", (1,), max_tokens=1)
    engine.step()
    assert engine.step() == [Launched(step=2, batch=()), Landed(step=2, sampled=())]
    assert not engine.model.has_work()
    engine.submit("r2", (1,))
    engine.abort("r2")
    assert engine.step() == [Launched(step=3, batch=()), Landed(step=3, sampled=())]
    assert not engine.model.has_work()


def test_with_empty_steps_an_abort_pause_is_pending_for_exactly_one(engine):
    engine = engine(profile=EMPTY_STEPS)
    engine.submit("r1", (1,))
    events = engine.pause("abort")
    assert [type(event) for event in events] == [Received, PausePending, Finished, Delivered]
    assert engine.model.state().pause_pending
    assert engine.step() == [
        Launched(step=1, batch=()),
        Landed(step=1, sampled=()),
        PauseEffective(mode="abort", clear_cache=False),
        Returned(op=1, answer={"status": "paused"}, error=None),
    ]


def test_with_empty_steps_no_step_of_a_keep_pause_computes(engine):
    engine = engine(profile=EMPTY_STEPS)
    engine.submit("r1", (1, 2))
    engine.submit("r2", (1,), max_tokens=1)
    engine.step()
    engine.pause("keep")
    assert engine.step()[0] == Launched(step=2, batch=())
    assert not engine.model.has_work()


def test_with_empty_steps_keep_joins_a_pending_abort_and_sets_its_mode(engine):
    engine = engine(profile=EMPTY_STEPS)
    engine.submit("r1", (1,))
    engine.pause("abort", clear_cache=True)
    assert engine.pause("keep") == [Received(op=2), PausePending(mode="keep", clear_cache=True)]
    assert [event.op for event in engine.step() if isinstance(event, Returned)] == [1, 2]
    assert engine.model.state().pause_mode == "keep"


@pytest.mark.parametrize(("profile", "left"), [(CAESURA, []), (WAIT_ADMITS_NOBODY, ["r2"])], ids=lambda value: getattr(value, "name", ""))
def test_whether_a_wait_admits_those_who_wait(engine, profile, left):
    engine = engine(profile=profile, max_num_seqs=1)
    engine.submit("r1", (1,), max_tokens=2)
    engine.submit("r2", (1,), max_tokens=1)
    engine.step()
    engine.pause("wait")
    assert PauseEffective(mode="wait", clear_cache=False) in engine.drain()
    assert engine.waiting == left
    engine.resume()
    assert engine.model.has_work() == bool(left)


@pytest.mark.parametrize(
    ("profile", "freed", "free"),
    [
        (CAESURA, Freed(request="r1", head=(1, 0), tail=()), (1, 0, 2, 3, 4, 5, 6, 7)),
        (FREED_TO_TAIL, Freed(request="r1", head=(), tail=(1, 0)), (2, 3, 4, 5, 6, 7, 1, 0)),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_where_blocks_go_when_caching_is_off(engine, profile, freed, free):
    engine = engine(profile=profile, prefix_caching=False)
    engine.submit("r1", range(5), max_tokens=1)
    assert freed in engine.drain()
    assert engine.free == free


def test_with_caching_on_blocks_without_a_digest_go_to_the_head_in_every_profile(engine):
    engine = engine(profile=FREED_TO_TAIL)
    engine.submit("r1", range(5), max_tokens=1)
    assert engine.model.schedule()[-1] == Launched(step=1, batch=(Scheduled("r1", 0, 5),))
    assert Freed(request="r1", head=(1,), tail=(0,)) in engine.model.land(lambda request, position: 7)
