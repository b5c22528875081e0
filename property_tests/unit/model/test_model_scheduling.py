"""The scheduler's rules, above all those that are easily modelled wrong."""

from __future__ import annotations

from harness.events import Admitted, Allocated, Delivered, Finished, Freed, Hit, Landed, Launched, Preempted, Scheduled, Stored


def batches(events):
    """Who computed how much, step by step."""
    return [[(scheduled.request, scheduled.count) for scheduled in event.batch] for event in events if isinstance(event, Launched)]


# Budget, chunks and admission.


def test_a_prefill_is_cut_to_the_budget_and_only_its_last_chunk_samples(engine, only):
    engine = engine(max_num_batched_tokens=4)
    engine.submit("r1", range(9), max_tokens=2)
    events = engine.steps(3)
    assert batches(events) == [[("r1", 4)], [("r1", 4)], [("r1", 1)]]
    assert [len(landed.sampled) for landed in only(events, Landed)] == [0, 0, 1]
    assert len(only(events, Delivered)) == 1


def test_decodes_and_prefills_share_one_budget_running_first(engine):
    engine = engine(max_num_batched_tokens=6)
    engine.submit("r1", range(5))
    engine.step()
    engine.submit("r2", range(20, 30))
    engine.submit("r3", range(30, 32))
    assert batches(engine.steps(3)) == [[("r1", 1), ("r2", 5)], [("r1", 1), ("r2", 5)], [("r1", 1), ("r2", 1), ("r3", 2)]]


def test_no_more_run_than_there_are_seats(engine):
    engine = engine(max_num_seqs=2)
    for request in ("r1", "r2", "r3"):
        engine.submit(request, (1, 2))
    engine.step()
    assert (engine.running, engine.waiting) == (["r1", "r2"], ["r3"])


def test_the_long_prefill_threshold_cuts_only_while_there_are_others(engine):
    engine = engine(long_prefill_token_threshold=3)
    engine.submit("r1", range(10))
    assert batches(engine.steps(1)) == [[("r1", 10)]]
    engine.submit("r2", range(20, 30))
    engine.submit("r3", range(40, 42))
    assert batches(engine.steps(2)) == [[("r1", 1), ("r2", 3), ("r3", 2)], [("r1", 1), ("r2", 3), ("r3", 1)]]


def test_the_whole_sequence_must_fit_and_nobody_overtakes(engine):
    engine = engine(num_blocks=4, max_num_batched_tokens=4)
    engine.submit("r1", range(6), max_tokens=8)
    engine.submit("long", range(20, 29), max_tokens=1)
    engine.submit("short", (1,), max_tokens=1)
    assert batches(engine.steps(2)) == [[("r1", 4)], [("r1", 2)]], "long needs 3 blocks, though 4 tokens need 1 of the 2 that are free"
    assert engine.waiting == ["long", "short"]


def test_hit_blocks_that_are_idle_count_against_the_free_ones(engine):
    engine = engine(num_blocks=3)
    engine.submit("r1", range(5), max_tokens=1)
    engine.drain()
    engine.submit("holder", range(20, 23), max_tokens=3)
    engine.step()
    engine.submit("r2", range(9), max_tokens=1)
    engine.step()
    assert engine.waiting == ["r2"], "one hit and two blocks more, but two are free, and the hit one is among them"


# Preemption.


def test_under_pressure_the_last_running_one_gives_way_to_the_front_of_waiting(engine):
    engine = engine(num_blocks=4, max_num_seqs=2)
    engine.submit("r1", range(7), max_tokens=4)
    engine.submit("r2", range(20, 27), max_tokens=4)
    engine.submit("r3", (1,), max_tokens=1)
    engine.steps(2)
    assert engine.step()[:4] == [
        Preempted(request="r2", by="r1"),
        Freed(request="r2", head=(), tail=(3, 2)),
        Allocated(request="r1", blocks=(3,), evicted=(3,)),
        Launched(step=3, batch=(Scheduled("r1", 8, 1),)),
    ], "none is admitted in a step that preempted"
    assert engine.waiting == ["r2", "r3"]
    assert engine.model.state().waiting[0].num_preemptions == 1


def test_a_request_that_is_the_last_gives_way_itself_and_the_running_part_ends(engine):
    engine = engine(num_blocks=4, max_num_seqs=2)
    engine.submit("r1", range(5), max_tokens=6)
    engine.submit("r2", range(20, 28), max_tokens=4)
    engine.step()
    assert engine.step()[:3] == [
        Preempted(request="r2", by="r2"),
        Freed(request="r2", head=(), tail=(3, 2)),
        Launched(step=2, batch=(Scheduled("r1", 5, 1),)),
    ]


def test_victims_of_one_step_stand_in_their_running_order(engine, only):
    engine = engine(num_blocks=4, max_num_batched_tokens=12, long_prefill_token_threshold=8)
    engine.submit("r1", range(15), max_tokens=1)
    for request in ("r2", "r3", "r4"):
        engine.submit(request, (20, 21))
    assert batches(engine.step()) == [[("r1", 8), ("r2", 2), ("r3", 2)]]
    assert [(preempted.request, preempted.by) for preempted in only(engine.step(), Preempted)] == [("r3", "r1"), ("r2", "r1")]
    assert engine.waiting == ["r2", "r3", "r4"]


def test_a_preempted_request_keeps_its_tokens_and_looks_up_generated_ones_too(engine, only):
    engine = engine(num_blocks=6)
    engine.submit("r1", range(3), max_tokens=9)
    engine.steps(7)
    engine.pause("keep", clear_cache=True)
    engine.submit("twin", (0, 1, 2, 103, 104, 105, 106, 107, 108), max_tokens=1)
    engine.resume()
    events = engine.step()
    assert only(events, Admitted) == [
        Admitted(request="r1", life=2, computed=0),
        Admitted(request="twin", life=1, computed=8),
    ]
    assert only(events, Launched)[0].batch == (Scheduled("r1", 0, 10), Scheduled("twin", 8, 1))
    assert engine.model.state().running[0].output == tuple(range(103, 111))


# After keep with clear.


def test_after_a_clear_those_preempted_stand_ahead_of_earlier_victims_and_late_arrivals(engine):
    engine = engine(num_blocks=4, max_num_seqs=2)
    engine.submit("r1", range(7), max_tokens=4)
    engine.submit("r2", range(20, 27), max_tokens=4)
    engine.steps(3)
    assert (engine.running, engine.waiting) == (["r1"], ["r2"])
    engine.pause("keep", clear_cache=True)
    engine.submit("late", (1,))
    assert engine.waiting == ["r1", "r2", "late"]


def test_after_a_clear_they_compete_for_budget_like_new_ones(engine):
    engine = engine(max_num_batched_tokens=8)
    engine.submit("r1", range(5), max_tokens=9)
    engine.submit("r2", range(20, 23), max_tokens=9)
    engine.steps(2)
    engine.pause("keep", clear_cache=True)
    engine.resume()
    assert batches(engine.steps(2)) == [[("r1", 7), ("r2", 1)], [("r1", 1), ("r2", 4)]]


def test_after_a_clear_they_compete_for_blocks_by_their_whole_length(engine):
    engine = engine(num_blocks=4, max_num_batched_tokens=8)
    engine.submit("r1", range(4), max_tokens=9)
    engine.submit("r2", range(20, 24), max_tokens=9)
    engine.steps(4)
    assert engine.running == ["r1", "r2"]
    engine.steps(1)
    engine.pause("keep", clear_cache=True)
    engine.resume()
    engine.step()
    assert (engine.running, engine.waiting) == (["r1"], ["r2"])


def test_after_a_clear_the_free_queue_keeps_the_order_of_release(engine):
    engine = engine()
    engine.submit("r1", range(9))
    engine.submit("r2", range(20, 26))
    engine.step()
    assert engine.free == (5, 6, 7)
    engine.pause("keep", clear_cache=True)
    assert engine.free == (2, 4, 5, 6, 7, 3, 1, 0), "r2 first, each from its last block: full ones to the tail, others to the head"


def test_readmitted_requests_with_a_common_prefix_share_new_blocks_at_once(engine, only):
    engine = engine()
    engine.submit("r1", (1, 2, 3, 4, 5))
    engine.submit("r2", (1, 2, 3, 4, 6))
    engine.step()
    engine.pause("keep", clear_cache=True)
    engine.resume()
    events = engine.step()
    first = only(events, Allocated)[0].blocks[0]
    assert only(events, Hit) == [Hit(request="r2", blocks=(first,))]
    assert engine.model.state().references[first] == 2


# The prefix cache.


def test_blocks_of_a_half_prefill_that_was_aborted_are_still_hit(engine, only):
    engine = engine(max_num_batched_tokens=6)
    engine.submit("r1", range(12))
    engine.step()
    engine.pause("abort")
    engine.submit("r2", range(12))
    engine.resume()
    assert only(engine.step(), Hit, Admitted) == [Hit(request="r2", blocks=(0,)), Admitted(request="r2", life=1, computed=4)]


def test_the_last_sampled_token_is_never_computed_so_the_block_it_fills_is_never_published(engine, only):
    engine = engine()
    engine.submit("r1", (1, 2, 3), max_tokens=1)
    assert only(engine.drain(), Stored) == []
    engine.submit("r2", (1, 2, 3), max_tokens=2)
    assert [len(stored.blocks) for stored in only(engine.drain(), Stored)] == [1]


def test_a_hit_leaves_at_least_one_token_to_compute(engine, only):
    engine = engine()
    for request in ("r1", "r2"):
        engine.submit(request, range(8), max_tokens=1)
    events = engine.step()
    assert only(events, Hit) == [Hit(request="r2", blocks=(0,))]
    assert only(events, Stored) == [Stored(request="r1", blocks=((0, 0), (1, 1))), Stored(request="r2", blocks=((2, 1),))]
    assert engine.model.state().digests == ((0,), (1, 2))


def test_of_equal_blocks_the_first_published_is_hit(engine, only):
    engine = engine()
    for request in ("r1", "r2"):
        engine.submit(request, range(4), max_tokens=1)
    engine.step()
    engine.submit("r3", range(5))
    assert only(engine.step(), Hit) == [Hit(request="r3", blocks=(0,))]


def test_eviction_takes_one_of_equal_blocks_and_spares_the_others(engine, only):
    engine = engine(num_blocks=5)
    for request in ("r1", "r2"):
        engine.submit(request, range(4), max_tokens=1)
    engine.step()
    assert engine.model.state().digests == ((0, 1),)
    assert engine.free == (2, 3, 4, 0, 1)
    engine.submit("r3", range(20, 34), max_tokens=1)
    assert only(engine.step(), Allocated) == [Allocated(request="r3", blocks=(2, 3, 4, 0), evicted=(0,))]
    engine.submit("r4", range(5), max_tokens=1)
    assert only(engine.step(), Hit) == [Hit(request="r4", blocks=(1,))]


def test_the_salt_separates_whole_chains(engine, only):
    engine = engine(num_blocks=12, max_num_batched_tokens=64)
    for request, salt in (("r1", None), ("r2", "a"), ("r3", "b"), ("r4", "a")):
        engine.submit(request, range(9), max_tokens=1, cache_salt=salt)
    events = engine.step()
    assert [[label for _, label in stored.blocks] for stored in only(events, Stored)] == [[0, 1], [2, 3], [4, 5]]
    assert only(events, Hit) == [Hit(request="r4", blocks=(3, 4))]


def test_equal_tokens_behind_different_ones_have_another_label(engine, only):
    engine = engine()
    engine.submit("r1", (1, 1, 1, 1, 7, 7, 7, 7), max_tokens=1)
    engine.submit("r2", (2, 2, 2, 2, 7, 7, 7, 7), max_tokens=1)
    assert [[label for _, label in stored.blocks] for stored in only(engine.step(), Stored)] == [[0, 1], [2, 3]]


def test_labels_outlive_a_clear(engine, only):
    engine = engine()
    engine.submit("r1", range(4), max_tokens=1)
    engine.drain()
    engine.pause("abort", clear_cache=True)
    engine.resume()
    engine.submit("r2", range(20, 24), max_tokens=1)
    engine.submit("r3", range(4), max_tokens=1)
    assert [[label for _, label in stored.blocks] for stored in only(engine.drain(), Stored)] == [[1], [0]]


def test_without_prefix_caching_nothing_is_published_or_hit(engine, only):
    engine = engine(prefix_caching=False, max_num_batched_tokens=32)
    for request in ("r1", "r2"):
        engine.submit(request, range(9), max_tokens=1)
    events = engine.drain()
    assert only(events, Hit, Stored) == []
    assert only(events, Freed) == [Freed(request="r1", head=(2, 1, 0), tail=()), Freed(request="r2", head=(5, 4, 3), tail=())]
    assert engine.free == (5, 4, 3, 2, 1, 0, 6, 7)


def test_a_shared_block_stays_with_its_sharer_and_is_in_neither_list(engine, only):
    engine = engine()
    engine.submit("r1", range(5))
    engine.submit("r2", range(5))
    engine.step()
    assert only(engine.abort("r1"), Freed) == [Freed(request="r1", head=(1,), tail=())]
    assert only(engine.abort("r2"), Freed) == [Freed(request="r2", head=(2,), tail=(0,))]


# Endings.


def test_an_eos_token_stops_unless_ignored_and_comes_before_length(engine, only):
    engine = engine(eos_token_ids=(2,))
    engine.submit("r1", (1,), max_tokens=1)
    engine.submit("r2", (1,), max_tokens=2, ignore_eos=True)
    events = engine.step(r1=2, r2=2)
    assert [(finished.request, finished.reason) for finished in only(events, Finished)] == [("r1", "stop")]
    assert [output.finish_reason for output in only(events, Delivered)[0].outputs] == ["stop", None]


def test_max_model_len_ends_a_request_before_max_tokens(engine, only):
    engine = engine(max_model_len=8)
    engine.submit("r1", range(6), max_tokens=100)
    assert [(finished.reason, finished.output_tokens) for finished in only(engine.drain(), Finished)] == [("length", 2)]


def test_those_that_end_in_one_step_are_freed_in_scheduling_order(engine, only):
    engine = engine()
    for request in ("r1", "r2"):
        engine.submit(request, (1, 2), max_tokens=1)
    events = engine.step()
    assert [type(event).__name__ for event in events[-5:]] == ["Finished", "Freed", "Finished", "Freed", "Delivered"]
    assert engine.free[:2] == (1, 0), "r2 was the last to give its block back"
