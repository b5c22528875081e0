"""Weight sessions, versions and epochs."""

from __future__ import annotations

import pytest

from harness.events import (
    Accepted,
    Committed,
    Failure,
    Finished,
    PartReceived,
    Received,
    Relabelled,
    Returned,
    UpdateFailed,
    UpdateStarted,
    VersionSpan,
    comparable,
)
from harness.operations import FinishWeightUpdate, Spoil, StartWeightUpdate, SwapWeights, UpdateWeights, UpdateWeightVersion, WeightSource

SOURCE = WeightSource(original=True)


def start(**fields):
    return StartWeightUpdate(**fields)


def part(k, n, **fields):
    return UpdateWeights(source=SOURCE, part=k, of=n, **fields)


def finish(version=None, **fields):
    return FinishWeightUpdate(version=version, **fields)


def without_messages(events):
    return [comparable(event) for event in events]


def refused(op, code):
    return Returned(op=op, answer=None, error=Failure(code, ""))


@pytest.fixture
def paused(engine):
    """Under an effective keep, with r1 frozen after its first token. Calls 0 and 1."""
    engine = engine()
    engine.submit("r1", (1, 2, 3, 4, 5), max_tokens=6)
    engine.step()
    engine.pause("keep")
    return engine


@pytest.fixture
def broken(paused):
    """Out of service under a keep pause. Calls 0 to 2."""
    paused.swap("v2", fails=True)
    return paused


def test_a_session_part_by_part(paused):
    assert paused.call(start()) == [
        Received(op=2),
        UpdateStarted(),
        Returned(op=2, answer={"status": "started"}, error=None),
    ]
    assert paused.model.state().update_open
    assert paused.call(part(2, 2)) == [
        Received(op=3),
        PartReceived(part=2, of=2, tensors=0, bytes=0),
        Returned(op=3, answer={"status": "updated"}, error=None),
    ]
    paused.call(part(1, 2))
    assert paused.call(finish("v2")) == [
        Received(op=5),
        Committed(version="v2"),
        Returned(op=5, answer={"status": "finished", "weight_version": "v2"}, error=None),
    ]
    state = paused.model.state()
    assert (state.update_open, state.weight_version, paused.model.epoch) == (False, "v2", 1)


def test_swap_is_a_whole_session_in_one_call(paused):
    assert paused.swap("v2") == [
        Received(op=2),
        UpdateStarted(),
        PartReceived(part=1, of=1, tensors=0, bytes=0),
        Committed(version="v2"),
        Returned(op=2, answer={"status": "finished", "weight_version": "v2"}, error=None),
    ]


def test_finish_without_a_version_commits_under_the_resident_label(paused):
    assert Committed(version="default") in paused.swap()
    assert paused.model.epoch == 1


def test_the_epoch_rises_at_the_first_byte_once_a_session(paused):
    paused.call(start())
    assert paused.model.epoch == 0
    paused.call(part(1, 2))
    paused.call(part(2, 2))
    assert paused.model.epoch == 1
    paused.call(finish())
    paused.call(start())
    paused.call(finish())
    assert paused.model.epoch == 1, "a session without a byte"
    paused.swap(fails=True)
    assert paused.model.epoch == 2, "the failing source broke after its first tensor"


def test_each_output_token_belongs_to_the_version_that_sampled_it(paused, only):
    paused.swap("v2")
    paused.resume()
    paused.steps(2)
    assert paused.model.token_versions("r1") == ("default", "v2", "v2")
    paused.pause("keep")
    paused.swap("v2")
    paused.resume()
    paused.step()
    paused.pause("keep")
    paused.swap("default")
    paused.resume()
    (finished,) = only(paused.drain(), Finished)
    assert finished.spans == (VersionSpan("default", 0, 1), VersionSpan("v2", 1, 4), VersionSpan("default", 4, 6))


def test_the_last_token_sampled_before_the_boundary_has_its_kv_computed_after_it(paused):
    paused.swap("v2")
    paused.resume()
    paused.step()
    assert paused.model.kv_epochs("r1") == (0, 0, 0, 0, 0, 1)
    assert paused.model.block_epochs(1) == (0, 1), "one block, two epochs"


def test_after_a_clear_all_kv_is_computed_by_the_new_weights(paused):
    paused.pause("keep", clear_cache=True)
    paused.swap("v2")
    paused.resume()
    paused.step()
    assert paused.model.kv_epochs("r1") == (1,) * 6
    assert paused.model.token_versions("r1") == ("default", "v2")


def test_without_a_clear_a_new_requests_hit_is_of_the_old_epoch(paused):
    paused.swap("v2")
    paused.resume()
    paused.submit("r2", (1, 2, 3, 4, 6))
    paused.step()
    assert paused.model.kv_epochs("r2") == (0, 0, 0, 0, 1)


def test_relabelling_changes_no_epoch(paused):
    assert paused.call(UpdateWeightVersion(version="b")) == [
        Received(op=2),
        Relabelled(version="b"),
        Returned(op=2, answer={"weight_version": "b"}, error=None),
    ]
    assert (paused.model.state().weight_version, paused.model.epoch) == ("b", 0)


# Refusals that change nothing.


def test_calls_in_the_wrong_state_conflict_and_change_nothing(paused, error):
    before = paused.model.state()
    assert error(paused.call(part(1, 1))) == "conflict"
    assert error(paused.call(finish("v2"))) == "conflict"
    assert paused.model.state() == before
    paused.call(start())
    before = paused.model.state()
    assert error(paused.call(start())) == "conflict"
    assert error(paused.swap("v2")) == "conflict"
    assert error(paused.resume()) == "conflict"
    assert error(paused.pause("wait")) == "conflict"
    assert paused.model.state() == before
    assert (before.update_open, paused.model.epoch) == (True, 0)


def test_weights_change_only_under_an_effective_pause_unless_allowed(engine, error):
    engine = engine()
    engine.submit("r1", (1, 2))
    engine.step()
    assert error(engine.swap("v2")) == "conflict"
    assert error(engine.call(UpdateWeightVersion(version="v2"))) == "conflict"
    assert error(engine.call(UpdateWeightVersion(version="v2", allow_unpaused=True))) is None
    engine.pause("wait")
    assert error(engine.call(start())) == "conflict", "a pending pause is not enough"
    assert error(engine.call(start(allow_unpaused=True))) == "conflict", "a pause is pending"
    assert error(engine.call(UpdateWeightVersion(version="v3"))) == "conflict"
    engine.resume()
    assert error(engine.call(start(allow_unpaused=True))) is None


def test_parts_of_one_session_name_one_of(paused, error):
    paused.call(start())
    paused.call(part(1, 3))
    assert error(paused.call(part(2, 2))) == "invalid"
    assert error(paused.call(part(2, 3))) is None


def test_a_start_that_fails_changes_nothing(paused):
    before = paused.model.state()
    assert without_messages(paused.call(start(fails=True))) == [
        Received(op=2),
        UpdateFailed(phase="start", wrote=False, why=""),
        refused(2, "failed"),
    ]
    assert paused.model.state() == before


def test_a_finish_that_fails_before_a_byte_leaves_the_session_open(paused):
    paused.call(start())
    before = paused.model.state()
    assert without_messages(paused.call(finish("v2", fails=True))) == [
        Received(op=3),
        UpdateFailed(phase="finish", wrote=False, why=""),
        refused(3, "failed"),
    ]
    assert paused.model.state() == before


def test_wait_is_refused_over_an_open_session_only_if_something_is_live(paused, error):
    paused.call(start())
    assert error(paused.pause("wait")) == "conflict"
    paused.abort("r1")
    assert error(paused.pause("wait")) is None


# Out of service.


@pytest.mark.parametrize(
    ("sent", "operation", "phase"),
    [
        pytest.param(part(1, 2), part(2, 2, fails=True), "update", id="in update"),
        pytest.param(part(1, 1), finish("v2", fails=True), "finish", id="in finish"),
    ],
)
def test_a_failure_after_the_first_byte_closes_the_session_and_takes_the_engine_out_of_service(paused, sent, operation, phase):
    paused.call(start())
    paused.call(sent)
    assert without_messages(paused.call(operation)) == [
        Received(op=4),
        UpdateFailed(phase=phase, wrote=True, why=""),
        refused(4, "failed"),
    ]
    state = paused.model.state()
    assert (state.update_open, state.out_of_service, state.weight_version, paused.model.epoch) == (False, True, "default", 1)


def test_out_of_service_resume_and_wait_are_refused_and_name_the_failed_update(broken, error):
    events = broken.resume()
    assert events[-1].error.code == "out-of-service"
    assert "weight update failed half-way, in update" in events[-1].error.message
    assert error(broken.pause("wait")) == "out-of-service"
    broken.call(start())
    assert error(broken.pause("wait")) == "out-of-service", "before the open session"
    assert error(broken.resume()) == "conflict", "the open session, before being out of service"


def test_out_of_service_frozen_requests_can_be_aborted(broken):
    assert broken.abort("r1")[-1].answer == {"aborted": 1}


def test_only_a_full_update_ends_being_out_of_service(broken, error):
    broken.call(start())
    assert error(broken.call(finish("v3"))) == "conflict"
    broken.call(part(1, 2))
    assert error(broken.call(finish("v3"))) == "conflict"
    assert broken.model.state().update_open
    broken.call(part(2, 2))
    assert error(broken.call(finish("v3"))) is None
    assert not broken.model.state().out_of_service
    assert error(broken.resume()) is None
    assert broken.model.has_work()


def test_a_session_that_names_parts_is_finished_when_it_has_them_all(paused, error):
    paused.call(start())
    paused.call(part(1, 2))
    assert error(paused.call(finish("v2"))) == "conflict"
    paused.call(part(2, 2))
    assert error(paused.call(finish("v2"))) is None


@pytest.fixture
def broken_while_running(engine):
    """Out of service without a pause: r1 runs no more. Calls 0 to 2."""

    def break_it(**shape):
        conversation = engine(**shape)
        conversation.submit("r1", (1, 2))
        conversation.step()
        conversation.call(start(allow_unpaused=True))
        conversation.call(part(1, 1, fails=True))
        return conversation

    return break_it


def test_out_of_service_nothing_runs_and_late_requests_park(broken_while_running):
    engine = broken_while_running()
    assert not engine.model.has_work()
    assert Accepted(request="r2", parked=True) in engine.submit("r2", (1,))
    engine.call(start(allow_unpaused=True))
    engine.call(part(1, 1))
    assert not engine.model.has_work(), "written, but not committed"
    engine.call(finish("v2"))
    assert [scheduled.request for scheduled in engine.model.schedule()[-1].batch] == ["r1", "r2"]


def test_coming_back_into_service_accepts_the_blocked_unless_paused(broken_while_running):
    for pause_first in (False, True):
        engine = broken_while_running(late_requests="block")
        engine.submit("r2", (1,))
        engine.submit("r3", (1,))
        if pause_first:
            engine.pause("keep")
        engine.call(start(allow_unpaused=True))
        engine.call(part(1, 1))
        accepted = [event.request for event in engine.call(finish("v2")) if isinstance(event, Accepted)]
        assert accepted == ([] if pause_first else ["r2", "r3"])
        assert engine.model.state().blocked == (("r2", "r3") if pause_first else ())


def test_while_paused_coming_back_into_service_leaves_the_parked(broken):
    broken.submit("r2", (1,))
    broken.swap("v2")
    assert broken.model.state().waiting[0].parked
    broken.resume()
    assert not broken.model.state().waiting[0].parked


def spoilt(tensor: int) -> WeightSource:
    return WeightSource(original=True, spoil=Spoil(tensor=tensor, how="nan"))


def test_a_session_whose_first_tensor_is_refused_stays_open_and_has_written_nothing(paused, only, error):
    paused.call(start())
    before = paused.model.state()
    events = paused.call(UpdateWeights(source=spoilt(0), part=1, of=2))
    assert error(events) == "failed"
    assert without_messages(only(events, UpdateFailed)) == [UpdateFailed(phase="update", wrote=False, why="")]
    assert paused.model.state() == before and paused.model.epoch == 0
    assert error(paused.call(part(1, 3))) is None, "the refused part did not fix the number of parts"


@pytest.mark.parametrize(("written_before", "tensor"), [(False, 1), (True, 0)])
def test_a_tensor_refused_after_others_takes_the_engine_out_of_service(paused, only, written_before, tensor):
    paused.call(start())
    if written_before:
        paused.call(part(1, 2))
    events = paused.call(UpdateWeights(source=spoilt(tensor), part=2, of=2))
    assert without_messages(only(events, UpdateFailed)) == [UpdateFailed(phase="update", wrote=True, why="")]
    state = paused.model.state()
    assert state.out_of_service and not state.update_open and paused.model.epoch == 1


def test_a_swap_whose_first_tensor_is_refused_leaves_no_session_open(paused, error):
    before = paused.model.state()
    assert error(paused.call(SwapWeights(source=spoilt(0), version="v2"))) == "failed"
    assert paused.model.state() == before
    assert error(paused.resume()) is None
