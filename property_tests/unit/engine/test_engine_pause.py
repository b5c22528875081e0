"""Pause, resume and abort: what each mode does, in which order it is reported, and what happens when calls meet."""

from __future__ import annotations

import pytest

from engine import Conflict, InvalidArgument, PauseSuperseded, RequestRejected, SamplingParams

PROMPT = list(range(20, 26))


def submit(engine, *request_ids: str, max_tokens: int = 8) -> None:
    for index, request_id in enumerate(request_ids):
        engine.submit(request_id, [index, *PROMPT], SamplingParams(max_tokens=max_tokens))


def pause(engine, mode: str, **flags) -> None:
    """Pause and let it take effect, dropping outputs; `wait` steps until it does."""
    engine.begin_pause(mode, **flags)
    settle(engine)


def settle(engine) -> None:
    engine.take_outputs()
    while not engine.pause_complete():
        engine.step()
        engine.take_outputs()


def ids(requests) -> list[str]:
    return [request.request_id for request in requests]


def waiting(engine) -> list[str]:
    return ids(engine.scheduler.waiting)


def running(engine) -> list[str]:
    return ids(engine.scheduler.running)


# ---- timelines ----


def test_timeline_of_a_request_from_submission_to_its_end(make_engine, recorder):
    engine = make_engine(observer=recorder, max_num_batched_tokens=4)
    engine.submit("r", [1, 2, 3, 4, 5], SamplingParams(max_tokens=2))
    while engine.has_work():
        engine.step()
    assert recorder.take() == [
        "accepted r parked=False",
        "allocated r [0] evicted=[]",
        "stored r 0:0",
        "admitted r life=1 num_computed_tokens=0",
        "launched 1 [[r 0 4]]",
        "landed 1",
        "allocated r [1] evicted=[]",
        "launched 2 [[r 4 1]]",
        "landed 2 r",
        "launched 3 [[r 5 1]]",
        "landed 3 r",
        "finished r reason=length num_prompt_tokens=5 num_output_tokens=2 spans=[[default 0 2]]",
        "freed r head=[1] tail=[0]",
    ]


def test_timeline_of_keep_with_clear(make_engine, recorder):
    engine = make_engine(observer=recorder)
    submit(engine, "a", "b")
    engine.step()
    engine.take_outputs()
    recorder.take()
    ticket = engine.begin_pause("keep")
    assert not ticket.done
    assert engine.pause_complete()
    assert ticket.done and ticket.error is None
    assert recorder.take() == [
        "pause_pending keep clear_cache=True",
        "preempted b by=None",
        "freed b head=[3] tail=[2]",
        "preempted a by=None",
        "freed a head=[1] tail=[0]",
        "cleared success=True empty=True",
        "pause_effective keep clear_cache=True",
    ]
    assert waiting(engine) == ["a", "b"]
    assert engine.scheduler.pool.free_queue[:2] == (1, 3)
    assert engine.scheduler.pool.free_queue[-2:] == (2, 0)
    engine.resume()
    engine.step()
    assert recorder.take()[:2] == ["resumed", "allocated a [1 3] evicted=[]"]


def test_timeline_of_abort_ends_every_request_in_order_of_submission(make_engine, recorder):
    engine = make_engine(observer=recorder, max_num_seqs=1)
    submit(engine, "running", "waiting")
    engine.step()
    engine.take_outputs()
    recorder.take()
    engine.begin_pause("abort", clear_cache=False)
    assert recorder.take() == [
        "pause_pending abort clear_cache=False",
        "finished running reason=abort num_prompt_tokens=7 num_output_tokens=1 spans=[[default 0 1]]",
        "freed running head=[1] tail=[0]",
        "finished waiting reason=abort num_prompt_tokens=7 num_output_tokens=0 spans=[]",
    ]
    assert not engine.pause_complete(), "outputs are still to be handed over"
    assert [(out.request_id, out.first, out.token_ids, out.finish_reason) for out in engine.take_outputs()] == [
        ("running", 1, (), "abort"),
        ("waiting", 0, (), "abort"),
    ]
    assert engine.pause_complete()
    assert recorder.take() == ["pause_effective abort clear_cache=False"]
    assert engine.scheduler.pool.find([digest for digest, _ in engine.scheduler.pool.digest_index]) == (0,), "hashes stay"


def test_timeline_of_wait_takes_effect_after_the_last_output_was_handed_over(make_engine, recorder):
    engine = make_engine(observer=recorder, max_num_seqs=1)
    submit(engine, "a", "b", max_tokens=1)
    recorder.take()
    ticket = engine.begin_pause("wait", clear_cache=False)
    engine.submit("late", PROMPT, SamplingParams())
    while engine.has_work():
        engine.step()
        assert not engine.pause_complete()
        engine.take_outputs()
    assert not ticket.done
    assert engine.pause_complete()
    assert ticket.done
    log = [line for line in recorder.take() if line.startswith(("pause", "admitted", "finished", "accepted"))]
    assert log == [
        "pause_pending wait clear_cache=False",
        "accepted late parked=True",
        "admitted a life=1 num_computed_tokens=0",
        "finished a reason=length num_prompt_tokens=7 num_output_tokens=1 spans=[[default 0 1]]",
        "admitted b life=1 num_computed_tokens=0",
        "finished b reason=length num_prompt_tokens=7 num_output_tokens=1 spans=[[default 0 1]]",
        "pause_effective wait clear_cache=False",
    ]
    assert waiting(engine) == ["late"]


# ---- modes ----


def test_keep_freezes_a_half_prefilled_request_where_it_is(make_engine):
    engine = make_engine(max_num_batched_tokens=4)
    submit(engine, "r")
    engine.step()
    pause(engine, "keep", clear_cache=False)
    assert not engine.has_work()
    engine.step()
    (request,) = engine.scheduler.running
    assert request.num_computed_tokens == 4
    engine.resume()
    assert engine.has_work()


@pytest.mark.parametrize("clear_cache", [False, True])
@pytest.mark.parametrize("overrides", [{}, {"num_blocks": 10}, {"prefix_caching": False, "max_num_batched_tokens": 5}])
def test_keep_with_unchanged_weights_changes_no_token(make_engine, clear_cache, overrides):
    def generate(pause_after: tuple[int, ...]) -> dict[str, list[int]]:
        engine = make_engine(**overrides)
        submit(engine, "a", "b", "c", max_tokens=12)
        tokens: dict[str, list[int]] = {}
        num_steps = 0
        while engine.has_work():
            engine.step()
            num_steps += 1
            for output in engine.take_outputs():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if num_steps in pause_after:
                pause(engine, "keep", clear_cache=clear_cache)
                engine.resume()
        return tokens

    assert generate(pause_after=(1, 4, 5, 9)) == generate(pause_after=())


def test_an_unknown_mode_is_refused_and_changes_nothing(make_engine, recorder):
    engine = make_engine(observer=recorder)
    with pytest.raises(ValueError, match="pause mode must be one of abort, wait, keep, got 'stop'"):
        engine.begin_pause("stop")
    assert recorder.log == [] and not engine.is_paused()


def test_clear_cache_clears_even_if_the_earlier_pause_did_not(make_engine):
    engine = make_engine()
    submit(engine, "a")
    engine.step()
    pause(engine, "keep", clear_cache=False)
    assert running(engine) == ["a"]
    pause(engine, "keep", clear_cache=True)
    assert waiting(engine) == ["a"] and engine.scheduler.pool.is_empty


def test_a_repeated_abort_ends_requests_parked_since_the_first(make_engine):
    engine = make_engine()
    pause(engine, "abort")
    submit(engine, "late")
    pause(engine, "abort")
    assert not engine.scheduler.has_live_requests


def test_wait_over_an_effective_keep_runs_frozen_and_parked_requests_to_their_end(make_engine):
    engine = make_engine()
    submit(engine, "frozen")
    engine.step()
    pause(engine, "keep")
    submit(engine, "parked")
    pause(engine, "wait")
    assert not engine.scheduler.has_live_requests
    assert engine.pause_mode == "wait" and not engine.pause_pending


def test_keep_over_an_effective_pause_changes_the_mode_only(make_engine):
    engine = make_engine()
    pause(engine, "abort")
    submit(engine, "parked")
    pause(engine, "keep", clear_cache=False)
    assert engine.pause_mode == "keep"
    assert waiting(engine) == ["parked"]


# ---- calls that meet ----


def pending_wait(engine):
    submit(engine, "a")
    engine.step()
    engine.take_outputs()
    ticket = engine.begin_pause("wait", clear_cache=False)
    assert not engine.pause_complete()
    return ticket


def test_keep_over_a_pending_wait_freezes_and_supersedes_it(make_engine):
    engine = make_engine()
    ticket = pending_wait(engine)
    keep = engine.begin_pause("keep", clear_cache=False)
    assert ticket.done and isinstance(ticket.error, PauseSuperseded)
    assert not keep.done
    settle(engine)
    assert keep.done and keep.error is None
    assert running(engine) == ["a"]


def test_a_superseded_call_no_longer_asks_for_a_clear(make_engine, recorder):
    engine = make_engine(observer=recorder)
    submit(engine, "a")
    engine.begin_pause("wait", clear_cache=True)
    engine.begin_pause("keep", clear_cache=False)
    assert recorder.log[-1] == "pause_pending keep clear_cache=False"


def test_abort_over_a_pending_wait_overrides_and_both_calls_return(make_engine):
    engine = make_engine()
    ticket = pending_wait(engine)
    abort = engine.begin_pause("abort")
    settle(engine)
    assert (ticket.done, ticket.error, abort.done, abort.error) == (True, None, True, None)
    assert engine.pause_mode == "abort"


def test_keep_over_a_wait_that_an_abort_overrode_supersedes_nothing(make_engine):
    engine = make_engine()
    tickets = [pending_wait(engine), engine.begin_pause("abort"), engine.begin_pause("wait"), engine.begin_pause("keep")]
    assert [ticket.error is not None for ticket in tickets] == [False, False, True, False]
    settle(engine)
    assert all(ticket.done for ticket in tickets)


def test_a_second_wait_joins_the_first_and_runs_what_was_parked_in_between(make_engine, recorder):
    engine = make_engine(observer=recorder)
    first = pending_wait(engine)
    engine.submit("between", PROMPT, SamplingParams(max_tokens=1))
    second = engine.begin_pause("wait", clear_cache=True)
    assert recorder.log[-1] == "pause_pending wait clear_cache=True"
    settle(engine)
    assert first.done and second.done
    assert not engine.scheduler.has_live_requests
    assert recorder.take()[-2:] == ["cleared success=True empty=True", "pause_effective wait clear_cache=True"]


def test_wait_over_a_keep_that_is_still_pending_runs_all_to_the_end_and_both_calls_return(make_engine):
    engine = make_engine()
    submit(engine, "a")
    engine.step()
    keep = engine.begin_pause("keep")
    wait = engine.begin_pause("wait")
    settle(engine)
    assert (keep.error, wait.error) == (None, None)
    assert keep.done and wait.done and not engine.scheduler.has_live_requests


def test_resume_over_a_pending_pause_supersedes_it_and_goes_on(make_engine, recorder):
    engine = make_engine(observer=recorder)
    ticket = pending_wait(engine)
    engine.submit("parked", PROMPT, SamplingParams())
    recorder.take()
    engine.resume()
    assert isinstance(ticket.error, PauseSuperseded) and ticket.error.code == "superseded"
    assert recorder.take() == ["resumed"]
    assert not engine.is_paused() and engine.pause_complete()
    engine.step()
    assert running(engine) == ["a", "parked"]


def test_tickets_are_settled_before_the_observer_hears_of_it(make_engine, recorder):
    engine = make_engine(observer=recorder)
    submit(engine, "a")
    seen = []
    tickets = [engine.begin_pause("wait")]
    recorder.pause_pending = lambda mode, **_: seen.append((mode, [ticket.done for ticket in tickets]))
    recorder.pause_effective = lambda mode, **_: seen.append((f"{mode} effective", [ticket.done for ticket in tickets]))
    tickets.append(engine.begin_pause("keep"))
    settle(engine)
    assert seen == [("keep", [True]), ("keep effective", [True, True])]


def test_resume_while_running_does_nothing(make_engine, recorder):
    engine = make_engine(observer=recorder)
    engine.resume()
    assert recorder.log == []


# ---- late requests ----


def test_late_requests_queue_behind_frozen_ones_until_resume(make_engine):
    engine = make_engine()
    submit(engine, "frozen")
    engine.step()
    pause(engine, "keep")
    assert engine.submit("late", PROMPT, SamplingParams()) == "parked"
    assert waiting(engine) == ["frozen", "late"]
    engine.resume()
    engine.step()
    assert running(engine) == ["frozen", "late"]


def test_late_requests_are_rejected_from_the_moment_that_a_pause_is_taken_up(make_engine, recorder):
    engine = make_engine(observer=recorder, late_requests="reject")
    engine.begin_pause("keep")
    recorder.take()
    with pytest.raises(RequestRejected, match="'late' came while the engine is paused") as refusal:
        engine.submit("late", PROMPT, SamplingParams())
    assert refusal.value.code == "rejected"
    assert recorder.log == []
    engine.resume()
    assert engine.submit("late", PROMPT, SamplingParams()) == "queued"


def test_blocked_requests_are_accepted_on_resume_in_their_order(make_engine, recorder):
    engine = make_engine(observer=recorder, late_requests="block")
    pause(engine, "keep")
    recorder.take()
    assert [engine.submit(request_id, PROMPT, SamplingParams()) for request_id in "ab"] == ["blocked", "blocked"]
    assert ids(engine.scheduler.blocked) == ["a", "b"] and not engine.scheduler.has_live_requests
    pause(engine, "abort")
    engine.resume()
    assert recorder.take() == [
        "blocked a",
        "blocked b",
        "pause_pending abort clear_cache=True",
        "cleared success=True empty=True",
        "pause_effective abort clear_cache=True",
        "resumed",
        "accepted a parked=False",
        "accepted b parked=False",
    ]


def test_wait_does_not_run_blocked_requests(make_engine):
    engine = make_engine(late_requests="block")
    pause(engine, "keep")
    submit(engine, "blocked")
    pause(engine, "wait")
    assert ids(engine.scheduler.blocked) == ["blocked"]


# ---- abort ----


def test_abort_reaches_every_state_and_counts_what_it_ended(make_engine, recorder):
    engine = make_engine(observer=recorder, max_num_seqs=2, late_requests="block")
    submit(engine, "running", "preempted", "waiting")
    engine.step()
    pause(engine, "keep", clear_cache=True)
    engine.resume()
    engine.step()
    pause(engine, "keep", clear_cache=False)
    submit(engine, "blocked")
    assert engine.abort(["unknown", "blocked", "waiting", "waiting"]) == 2
    assert engine.abort(None) == 2
    assert engine.abort(None) == 0
    ended = [line.split()[1] for line in recorder.log if line.startswith("finished")]
    assert ended == ["blocked", "waiting", "running", "preempted"]
    assert engine.scheduler.pool.num_free == engine.config.num_blocks


def test_an_aborted_id_may_be_used_again(make_engine):
    engine = make_engine()
    submit(engine, "r")
    engine.abort(["r"])
    assert engine.submit("r", PROMPT, SamplingParams()) == "queued"


def test_an_abort_ends_a_pending_wait(make_engine):
    engine = make_engine()
    ticket = pending_wait(engine)
    engine.abort(["a"])
    assert not engine.pause_complete()
    engine.take_outputs()
    assert engine.pause_complete() and ticket.done


# ---- the convenience call, and resets ----


def test_the_convenience_pause_is_done_when_it_returns_and_hands_over_the_outputs(make_engine):
    engine = make_engine()
    submit(engine, "a")
    engine.step()
    outputs = engine.pause()
    assert [(output.token_ids != (), output.finish_reason) for output in outputs] == [(True, None), (False, "abort")]
    assert engine.is_paused() and not engine.pause_pending and engine.take_outputs() == []


def test_the_convenience_pause_refuses_wait_under_both_names(make_engine):
    engine = make_engine()
    with pytest.raises(InvalidArgument, match="use begin_pause"):
        engine.pause("wait")
    with pytest.warns(DeprecationWarning, match='mode="wait"'), pytest.raises(ValueError, match="use begin_pause"):
        engine.pause(wait_for_inflight_requests=True)
    assert not engine.is_paused()
    with pytest.warns(DeprecationWarning):
        engine.pause("keep", wait_for_inflight_requests=False)
    assert engine.pause_mode == "keep"


def test_a_reset_is_busy_while_running_requests_hold_blocks(make_engine, recorder):
    engine = make_engine(observer=recorder)
    submit(engine, "a")
    engine.step()
    recorder.take()
    with pytest.raises(Exception, match="2 of 32 blocks are held") as refusal:
        engine.reset_prefix_cache()
    assert refusal.value.code == "busy"
    assert recorder.take() == ["cleared success=False empty=False"]
    pause(engine, "keep", clear_cache=False)
    engine.reset_prefix_cache()
    assert recorder.take()[-3:] == ["preempted a by=None", "freed a head=[1] tail=[0]", "cleared success=True empty=True"]


def test_the_version_changes_only_under_an_effective_pause_unless_told_otherwise(make_engine, recorder):
    engine = make_engine(observer=recorder)
    pending_wait(engine)
    with pytest.raises(Conflict, match="only while a pause is effective"):
        engine.update_weight_version("v2")
    engine.update_weight_version("v2", allow_unpaused=True)
    assert recorder.take()[-1] == "relabelled v2"
    settle(engine)
    engine.update_weight_version("v3")
    assert engine.weight_version == "v3"
    with pytest.raises(InvalidArgument, match="at least one character"):
        engine.update_weight_version("")
