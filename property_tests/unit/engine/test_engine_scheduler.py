"""Rules R8 to R25 of the scheduler, without a model: every sampled token is 7 unless said otherwise."""

from __future__ import annotations

from engine import SamplingParams
from engine.request import Request, RequestStatus
from engine.scheduler import Scheduler


def submit(scheduler: Scheduler, request_id: str, prompt: list[int], *, parked: bool = False, **params) -> Request:
    request = Request(request_id, prompt, SamplingParams(**{"max_tokens": 100, **params}), scheduler.config.block_size)
    scheduler.add(request, parked=parked)
    return request


def step(scheduler: Scheduler, token: int = 7) -> list[tuple[str, int, int]]:
    """Schedule and land one step; what was scheduled."""
    batch = scheduler.schedule()
    for share in batch:
        if share.samples:
            scheduler.land(share, token, version="v")
    return [(share.request.request_id, share.first, share.num_tokens) for share in batch]


def ids(requests) -> list[str]:
    return [request.request_id for request in requests]


def distinct(count: int, *, start: int) -> list[int]:
    return list(range(start, start + count))


def test_a_prompt_is_cut_to_the_budget_and_samples_in_its_last_chunk(make_scheduler):
    scheduler = make_scheduler(max_num_batched_tokens=4)
    request = submit(scheduler, "r", distinct(10, start=0))
    assert [step(scheduler) for _ in range(2)] == [[("r", 0, 4)], [("r", 4, 4)]]
    assert request.output_token_ids == ()
    assert step(scheduler) == [("r", 8, 2)]
    assert request.output_token_ids == (7,)
    assert step(scheduler) == [("r", 10, 1)]


def test_running_requests_go_first_and_share_one_budget_with_admissions(make_scheduler):
    scheduler = make_scheduler(max_num_batched_tokens=8)
    submit(scheduler, "a", distinct(4, start=0))
    step(scheduler)
    submit(scheduler, "b", distinct(20, start=100))
    submit(scheduler, "c", distinct(4, start=200))
    assert step(scheduler) == [("a", 4, 1), ("b", 0, 7)]
    assert ids(scheduler.waiting) == ["c"]


def test_at_most_max_num_seqs_run(make_scheduler):
    scheduler = make_scheduler(max_num_seqs=2)
    for request_id in "abc":
        submit(scheduler, request_id, [1, 2])
    step(scheduler)
    assert ids(scheduler.running) == ["a", "b"]


def test_the_long_prefill_threshold_holds_only_when_there_are_several_requests(make_scheduler):
    scheduler = make_scheduler(long_prefill_token_threshold=3)
    submit(scheduler, "a", distinct(20, start=0))
    assert step(scheduler) == [("a", 0, 16)]
    submit(scheduler, "b", distinct(20, start=100))
    assert step(scheduler) == [("a", 16, 3), ("b", 0, 3)]


def test_a_request_is_admitted_only_if_all_its_tokens_fit_and_nobody_overtakes_it(make_scheduler):
    scheduler = make_scheduler(num_blocks=6, max_num_batched_tokens=4)
    submit(scheduler, "a", distinct(4, start=0))
    step(scheduler)
    submit(scheduler, "large", distinct(21, start=100))  # 6 blocks: its first chunk of one block would fit
    submit(scheduler, "small", [1, 2])
    assert step(scheduler) == [("a", 4, 1)]
    assert ids(scheduler.waiting) == ["large", "small"]


def test_the_last_running_request_is_preempted_to_the_front_and_nobody_is_admitted_in_that_step(make_scheduler, recorder):
    scheduler = make_scheduler(num_blocks=4, prefix_caching=False)
    submit(scheduler, "a", distinct(8, start=0))
    victim = submit(scheduler, "b", distinct(7, start=100))
    step(scheduler)
    submit(scheduler, "c", [1])
    recorder.take()
    assert step(scheduler) == [("a", 8, 1)]  # a needs a third block; both of b's come back
    assert recorder.take() == ["preempted b by=a", "freed b head=[3 2] tail=[]", "allocated a [3] evicted=[]"]
    assert ids(scheduler.waiting) == ["b", "c"]
    assert victim.status is RequestStatus.PREEMPTED
    assert (victim.num_computed_tokens, victim.num_preemptions, victim.output_token_ids) == (0, 1, (7,))


def test_the_last_running_request_gives_way_itself_when_it_is_the_one_in_need(make_scheduler, recorder):
    scheduler = make_scheduler(num_blocks=4, prefix_caching=False)
    submit(scheduler, "a", distinct(6, start=0))
    submit(scheduler, "b", distinct(7, start=100))
    step(scheduler)
    step(scheduler)
    recorder.take()
    assert step(scheduler) == [("a", 7, 1)]
    assert recorder.take() == ["preempted b by=b", "freed b head=[3 2] tail=[]"]
    assert (ids(scheduler.running), ids(scheduler.waiting)) == (["a"], ["b"])


def test_several_victims_of_one_step_wait_in_their_running_order(make_scheduler, recorder):
    scheduler = make_scheduler(num_blocks=6, long_prefill_token_threshold=8)
    submit(scheduler, "a", distinct(24, start=0))
    for request_id in "bcd":
        submit(scheduler, request_id, [1], parked=request_id == "d")
    step(scheduler)
    step(scheduler)
    recorder.take()
    assert step(scheduler) == [("a", 16, 8)]  # two blocks, and none is free
    assert [line for line in recorder.log if line.startswith("preempted")] == ["preempted c by=a", "preempted b by=a"]
    assert ids(scheduler.waiting) == ["b", "c", "d"]


def test_a_request_that_would_fit_again_at_once_is_not_admitted_in_the_step_that_preempted_it(make_scheduler):
    scheduler = make_scheduler(num_blocks=3)
    for request_id in "ab":
        submit(scheduler, request_id, distinct(4, start=0))
    step(scheduler)
    assert step(scheduler) == [("a", 4, 1)]  # b gave way: with a hit on a's equal block it would need only what it gave back
    assert step(scheduler) == [("a", 5, 1), ("b", 4, 1)]


def test_a_preempted_request_computes_prompt_and_generated_tokens_again_and_goes_on(make_scheduler, recorder):
    scheduler = make_scheduler()
    request = submit(scheduler, "r", [1, 2, 3, 4, 5, 6])
    step(scheduler)
    step(scheduler)
    scheduler.preempt_all()
    scheduler.pool.clear()
    recorder.take()
    assert step(scheduler, token=9) == [("r", 0, 8)]
    assert request.output_token_ids == (7, 7, 9)
    assert "admitted r life=2 num_computed_tokens=0" in recorder.log


def test_a_prefix_hit_leaves_the_last_token_to_compute(make_scheduler):
    scheduler = make_scheduler()
    submit(scheduler, "a", distinct(8, start=0), max_tokens=1)
    step(scheduler)
    submit(scheduler, "b", distinct(8, start=0), max_tokens=1)
    assert step(scheduler) == [("b", 4, 4)]


def test_a_request_hits_blocks_published_earlier_in_the_same_step(make_scheduler, recorder):
    scheduler = make_scheduler()
    submit(scheduler, "a", distinct(6, start=0))
    submit(scheduler, "b", distinct(6, start=0))
    recorder.take()
    scheduler.schedule()
    assert recorder.take() == [
        "allocated a [0 1] evicted=[]",
        "stored a 0:0",
        "admitted a life=1 num_computed_tokens=0",
        "hit b [0]",
        "allocated b [2] evicted=[]",
        "admitted b life=1 num_computed_tokens=4",
    ]
    assert scheduler.pool.references[0] == 2


def test_salts_keep_equal_prefixes_apart(make_scheduler):
    scheduler = make_scheduler()
    for request_id, salt in (("a", None), ("b", "x"), ("c", "x")):
        submit(scheduler, request_id, distinct(6, start=0), cache_salt=salt)
    assert step(scheduler) == [("a", 0, 6), ("b", 0, 6), ("c", 4, 2)]


def test_a_block_that_only_the_last_sampled_token_would_fill_is_never_published(make_scheduler, recorder):
    scheduler = make_scheduler()
    submit(scheduler, "r", [1, 2, 3], max_tokens=1)
    step(scheduler)
    assert not [line for line in recorder.log if line.startswith("stored")]
    assert recorder.log[-1] == "freed r head=[0] tail=[]"


def test_a_block_filled_by_generated_tokens_is_published_when_its_last_token_is_computed(make_scheduler, recorder):
    scheduler = make_scheduler()
    submit(scheduler, "r", [1, 2, 3])
    step(scheduler)
    recorder.take()
    step(scheduler)
    assert recorder.take() == ["stored r 0:0"]
    assert step(scheduler) == [("r", 4, 1)]
    assert recorder.take() == ["allocated r [1] evicted=[]"]


def test_equal_blocks_are_each_published_under_one_digest(make_scheduler):
    scheduler = make_scheduler()
    submit(scheduler, "a", distinct(4, start=0))
    submit(scheduler, "b", distinct(4, start=0))  # equal, but a whole prompt is never hit
    step(scheduler)
    ((_, blocks),) = scheduler.pool.digest_index
    assert blocks == (0, 1)


def test_without_prefix_caching_nothing_is_published_or_hit(make_scheduler, recorder):
    scheduler = make_scheduler(prefix_caching=False)
    submit(scheduler, "a", distinct(8, start=0), max_tokens=1)
    step(scheduler)
    assert recorder.log[-1] == "freed a head=[1 0] tail=[]"
    submit(scheduler, "b", distinct(8, start=0))
    assert step(scheduler) == [("b", 0, 8)]
    assert scheduler.pool.digest_index == ()


def test_an_aborted_half_prefill_is_still_hit(make_scheduler):
    scheduler = make_scheduler(max_num_batched_tokens=8)
    request = submit(scheduler, "a", distinct(20, start=0))
    step(scheduler)
    scheduler.finish(request, "abort")
    submit(scheduler, "b", distinct(20, start=0))
    assert step(scheduler) == [("b", 8, 8)]


def test_preempting_all_keeps_the_running_order_ahead_of_earlier_victims_and_late_arrivals(make_scheduler):
    scheduler = make_scheduler(max_num_seqs=3, num_blocks=6, prefix_caching=False)
    for request_id, start in (("a", 0), ("b", 100), ("c", 200)):
        submit(scheduler, request_id, distinct(5, start=start))
    step(scheduler)
    while len(scheduler.running) == 3:
        step(scheduler)
    submit(scheduler, "late", [1])
    assert ids(scheduler.running) == ["a", "b"]
    scheduler.preempt_all()
    assert ids(scheduler.waiting) == ["a", "b", "c", "late"]
    assert scheduler.pool.is_empty


def test_parked_requests_are_not_admitted_until_they_are_unparked(make_scheduler):
    scheduler = make_scheduler()
    submit(scheduler, "a", [1, 2])
    submit(scheduler, "parked", [3], parked=True)
    assert step(scheduler) == [("a", 0, 2)]
    scheduler.finish(scheduler.requests["a"], "abort")
    assert not scheduler.has_work
    scheduler.unpark()
    assert scheduler.has_work
    assert step(scheduler) == [("parked", 0, 1)]


def test_a_request_ends_by_length_at_max_tokens_and_at_max_model_len(make_scheduler, recorder):
    scheduler = make_scheduler(max_model_len=8)
    submit(scheduler, "short", [1, 2], max_tokens=1)
    submit(scheduler, "full", [1, 2, 3, 4, 5, 6, 7], max_tokens=9)
    step(scheduler)
    ended = [line for line in recorder.log if line.startswith("finished")]
    assert ended == [
        "finished short reason=length num_prompt_tokens=2 num_output_tokens=1 spans=[[v 0 1]]",
        "finished full reason=length num_prompt_tokens=7 num_output_tokens=1 spans=[[v 0 1]]",
    ]


def test_an_end_of_sequence_token_stops_unless_it_is_ignored(make_scheduler, recorder):
    scheduler = make_scheduler(eos_token_ids=(7, 8))
    submit(scheduler, "stops", [1, 2])
    submit(scheduler, "ignores", [1, 2], ignore_eos=True)
    step(scheduler)
    assert ids(scheduler.running) == ["ignores"]
    assert "finished stops reason=stop num_prompt_tokens=2 num_output_tokens=1 spans=[[v 0 1]]" in recorder.log


def test_the_last_allowed_token_stops_rather_than_runs_out_when_it_ends_the_sequence(make_scheduler, recorder):
    scheduler = make_scheduler(eos_token_ids=(7,))
    submit(scheduler, "r", [1, 2], max_tokens=1)
    step(scheduler)
    assert "reason=stop" in recorder.log[-2]


def test_version_spans_join_neighbours_of_one_label(make_scheduler):
    request = submit(make_scheduler(), "r", [1])
    for version in ("a", "a", "b", "a"):
        request.append(7, version=version)
    assert request.weight_versions == (("a", 0, 2), ("b", 2, 3), ("a", 3, 4))
