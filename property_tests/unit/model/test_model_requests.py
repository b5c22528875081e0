"""What submit and abort answer, and what the model refuses to be asked."""

from __future__ import annotations

import pytest

from harness.events import Delivered, Dropped, Finished, Freed, Landed, Output
from harness.operations import Abort, Advance, Prompt, Step, Submit


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        pytest.param((), {}, id="an empty prompt"),
        pytest.param(range(32), {}, id="a prompt of max_model_len"),
        pytest.param((1,), {"max_tokens": 0}, id="no token wanted"),
    ],
)
def test_bad_arguments_are_invalid_and_change_nothing(engine, error, prompt, fields):
    engine = engine()
    before = engine.model.state()
    assert error(engine.submit("r1", prompt, **fields)) == "invalid"
    assert engine.model.state() == before


def test_a_prompt_one_token_short_of_max_model_len_yields_one_token(engine, only):
    engine = engine(max_num_batched_tokens=64)
    engine.submit("r1", range(31), max_tokens=9)
    assert only(engine.drain(), Delivered) == [Delivered(outputs=(Output("r1", 0, (131,), "length"),))]


def test_a_request_that_could_outgrow_the_pool_is_invalid(engine, error):
    engine = engine(num_blocks=2)
    assert error(engine.submit("r1", (1, 2, 3), max_tokens=6)) == "invalid"
    assert error(engine.submit("r1", (1, 2, 3), max_tokens=5)) is None


def test_max_model_len_bounds_what_a_request_may_need(engine, error):
    engine = engine(num_blocks=2, max_model_len=8)
    assert error(engine.submit("r1", (1, 2, 3), max_tokens=1000)) is None


def test_a_live_id_is_invalid_and_a_finished_one_begins_anew(engine, error, only):
    engine = engine()
    engine.submit("r1", (1,), max_tokens=1)
    assert error(engine.submit("r1", (1,))) == "invalid"
    engine.drain()
    assert error(engine.submit("r1", (1,), max_tokens=1)) is None
    assert only(engine.drain(), Delivered) == [Delivered(outputs=(Output("r1", 0, (101,), "length"),))]


def test_abort_works_on_waiting_running_and_preempted_ones_in_the_order_given(engine, only):
    engine = engine(num_blocks=4, max_num_seqs=2)
    engine.submit("runs", range(7), max_tokens=4)
    engine.submit("preempted", range(20, 27), max_tokens=4)
    engine.submit("waits", (1,))
    engine.steps(3)
    events = engine.abort("waits", "unknown", "preempted", "waits", "runs")
    assert [(type(event).__name__, event.request) for event in only(events, Finished, Freed)] == [
        ("Finished", "waits"),
        ("Finished", "preempted"),
        ("Finished", "runs"),
        ("Freed", "runs"),
    ]
    assert only(events, Delivered) == [
        Delivered(outputs=(Output("waits", 0, (), "abort"), Output("preempted", 2, (), "abort"), Output("runs", 3, (), "abort")))
    ]
    assert events[-1].answer == {"aborted": 3}
    assert len(engine.free) == 4


def test_abort_of_nothing_delivers_nothing(engine, only):
    engine = engine()
    events = engine.call(Abort(ids="all"))
    assert only(events, Delivered) == []
    assert events[-1].answer == {"aborted": 0}


def test_abort_all_ends_blocked_ones_too(engine):
    engine = engine(late_requests="block")
    engine.submit("r1", (1,))
    engine.pause("keep")
    engine.submit("r2", (1,))
    assert engine.call(Abort(ids="all"))[-1].answer == {"aborted": 2}
    assert engine.model.state().blocked == ()


@pytest.mark.parametrize("operation", [Step(), Advance(steps=1)])
def test_the_drivers_verbs_are_refused_by_name(engine, operation):
    with pytest.raises(ValueError, match=f"got `{operation.verb}`.*step, advance are carried out by the lockstep driver"):
        engine().call(operation)


def test_a_prompt_of_text_is_refused(engine):
    with pytest.raises(ValueError, match="tokenise it first"):
        engine().call(Submit(id="r1", prompt=Prompt(text="hello")))


def test_a_step_is_launched_after_the_one_before_has_landed(engine):
    engine = engine()
    engine.submit("r1", (1,))
    engine.model.schedule()
    assert engine.model.landing_due and not engine.model.launch_due
    with pytest.raises(RuntimeError, match=r"schedule.* while launch_due is false"):
        engine.model.schedule()


def test_an_abort_between_launch_and_landing_drops_the_token(engine):
    engine = engine()
    engine.submit("r1", (1,))
    engine.model.schedule()
    engine.abort("r1")
    assert engine.model.land(lambda request, position: 7) == [Landed(step=1, sampled=()), Dropped(step=1, request="r1", why="aborted")]


def test_no_step_without_work_and_no_landing_without_a_step(engine):
    model = engine().model
    with pytest.raises(RuntimeError, match="launch_due"):
        model.schedule()
    with pytest.raises(RuntimeError, match="schedule"):
        model.land(lambda request, position: 0)
