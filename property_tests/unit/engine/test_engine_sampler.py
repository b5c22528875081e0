"""A drawn token is a function of its request's seed, its position and the logits; how it is drawn is what the parameters say."""

from __future__ import annotations

import pytest
import torch

from engine import EngineCoreOutput, InvalidArgument, SamplingParams
from engine.sampler import Draw, SampledToken, _gumbel, sample, stream_of
from engine.splitmix import mixed, states

PROMPT = [(7 * i) % 500 for i in range(17)]
HOT = {"temperature": 1.3, "max_tokens": 20, "ignore_eos": True}


def draws(count: int, **params) -> list[Draw]:
    """One draw for each of `count` positions."""
    made = SamplingParams(**params)
    return [Draw(made, stream_of(made, "r"), position) for position in range(count)]


def sampled(logits: torch.Tensor, asked: list[Draw]) -> list[SampledToken]:
    return sample(logits, asked).to_host().wait()


def tokens(logits: list[float], count: int = 4000, **params) -> list[int]:
    rows = torch.tensor(logits).expand(count, -1)
    return [token.token_id for token in sampled(rows, draws(count, **{"temperature": 1.0, **params}))]


def shares(found: list[int], size: int) -> list[float]:
    return [found.count(token_id) / len(found) for token_id in range(size)]


# ---- the distribution ----


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_come_as_often_as_the_softmax_says(temperature):
    logits = [0.0, 1.0, 2.0, -1.0]
    expected = (torch.tensor(logits) / temperature).softmax(dim=0).tolist()
    assert shares(tokens(logits, temperature=temperature), 4) == pytest.approx(expected, abs=0.025)


def test_at_temperature_zero_the_best_token_is_taken_and_of_equals_the_first():
    assert set(tokens([0.0, 3.0, 3.0, 1.0], count=20, temperature=0.0, top_k=3, min_p=0.1)) == {1}


@pytest.mark.parametrize("temperature", [1e-30, 1e-300])
def test_a_temperature_near_zero_is_as_good_as_greedy(temperature):
    assert set(tokens([0.0, 3.0, 2.9, 1.0], count=20, temperature=temperature, top_p=0.9)) == {1}


def test_top_k_leaves_the_best_tokens_in_their_proportion():
    found = shares(tokens([0.0, 1.0, 2.0, -1.0], top_k=2), 4)
    assert found == pytest.approx([0, *torch.tensor([1.0, 2.0]).softmax(dim=0).tolist(), 0], abs=0.025)


def test_top_k_takes_the_first_of_equals():
    assert set(tokens([1.0, 1.0, 1.0, 0.0], count=200, top_k=2)) == {0, 1}


def test_top_p_leaves_the_fewest_tokens_that_reach_it():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert set(tokens(logits, count=500, top_p=0.79)) == {0, 1}
    assert set(tokens(logits, count=500, top_p=0.81)) == {0, 1, 2}
    assert set(tokens(logits, count=50, top_p=1e-9)) == {0}


def test_min_p_leaves_tokens_near_the_best():
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log().tolist()
    assert set(tokens(logits, count=500, min_p=0.2)) == {0, 1, 2}
    assert set(tokens(logits, count=50, min_p=1.0)) == {0}


def test_filters_apply_one_after_the_other():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log().tolist()
    assert set(tokens(logits, count=500, top_k=2, top_p=0.6)) == {0, 1}  # of the two that are left the first has 0.57
    assert set(tokens(logits, count=500, min_p=0.6, top_k=3, top_p=0.5)) == {0}


# ---- the random numbers ----


def test_random_words_are_those_of_splitmix64():
    assert [word % (1 << 64) for word in mixed(states(1234567, 1, 3, torch.device("cpu"))).tolist()] == [
        6457827717110365317,  # published first outputs for this seed
        3203168211198807973,
        9817491932198370423,
    ]


def test_noise_is_finite_and_of_the_gumbel_distribution():
    noise = torch.cat([_gumbel(draw, 5000, torch.device("cpu")) for draw in draws(20, temperature=1.0)])
    assert noise.isfinite().all()
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(noise.var()) == pytest.approx(torch.pi**2 / 6, abs=0.03)


def test_positions_seeds_and_ids_have_noise_of_their_own():
    made = SamplingParams(temperature=1.0, seed=1)
    keys = [(stream_of(made, "a"), 0), (stream_of(made, "a"), 1), (stream_of(SamplingParams(seed=2), "a"), 0)]
    keys += [(stream_of(SamplingParams(), "a"), 0), (stream_of(SamplingParams(), "b"), 0), (stream_of(SamplingParams(), "seed 1"), 0)]
    noise = [tuple(_gumbel(Draw(made, stream, position), 4, torch.device("cpu")).tolist()) for stream, position in keys]
    assert len(set(noise)) == len(noise)


def test_a_seed_makes_the_id_irrelevant():
    assert stream_of(SamplingParams(seed=7), "a") == stream_of(SamplingParams(seed=7), "b")


def test_rows_do_not_see_each_other():
    torch.manual_seed(0)
    logits, asked = torch.randn(9, 301), draws(9, temperature=1.0, top_p=0.9, top_k=50, logprobs=3)
    assert sampled(logits, asked) == [token for row, draw in zip(logits, asked, strict=True) for token in sampled(row[None], [draw])]


# ---- in the engine ----


def test_batch_chunks_and_pauses_change_no_drawn_token(make_engine, drain):
    def run(*, companions: bool, pauses: bool, **shape) -> list[int]:
        engine = make_engine(**shape)
        engine.submit("r", PROMPT, SamplingParams(**HOT, seed=5, top_p=0.95))
        if companions:
            for number in range(3):
                engine.submit(f"c{number}", PROMPT[number:], SamplingParams(**HOT))
        told: list[EngineCoreOutput] = []
        for step in range(30 if pauses else 0):
            engine.step()
            told += engine.take_outputs()
            engine.pause("keep", clear_cache=step % 9 == 0)
            engine.resume()
        before = [token_id for output in told if output.request_id == "r" for token_id in output.token_ids]
        return before + drain(engine).get("r", [])

    alone = run(companions=False, pauses=False)
    assert len(set(alone)) > 10
    assert run(companions=True, pauses=False, max_num_batched_tokens=5) == alone
    assert run(companions=True, pauses=True, num_blocks=14) == alone


def test_a_request_aborted_and_handed_in_again_goes_on_with_the_same_draws(make_engine, drain):
    engine = make_engine()
    params = SamplingParams(**HOT, seed=5)
    engine.submit("whole", PROMPT, params)
    whole = drain(engine)["whole"]
    engine.submit("rest", PROMPT + whole[:8], SamplingParams(**{**HOT, "max_tokens": 12}, seed=5))
    assert drain(engine)["rest"] == whole[8:]


def test_logprobs_are_the_models_own_and_come_with_each_token(make_engine):
    engine = make_engine()
    engine.submit("r", PROMPT, SamplingParams(temperature=2.0, seed=1, max_tokens=3, logprobs=4, top_k=5))
    engine.submit("silent", PROMPT, SamplingParams(max_tokens=3))
    outputs = []
    while engine.has_work():
        engine.step()
        outputs += engine.take_outputs()
    assert {output.logprobs for output in outputs if output.request_id == "silent"} == {None}
    told = [(token, logprobs) for o in outputs if o.request_id == "r" for token, logprobs in zip(o.token_ids, o.logprobs, strict=True)]
    assert len(told) == 3
    for token_id, logprobs in told:
        assert len(logprobs.top) == 4
        assert [value for _, value in logprobs.top] == sorted((value for _, value in logprobs.top), reverse=True)
        assert logprobs.chosen <= logprobs.top[0][1] <= 0
        assert dict(logprobs.top).get(token_id, logprobs.chosen) == logprobs.chosen


def test_log_probabilities_are_those_of_log_softmax():
    torch.manual_seed(0)
    row = torch.randn(1, 50)
    (token,) = sampled(row, draws(1, logprobs=50))
    expected = row[0].double().log_softmax(dim=0)
    assert dict(token.logprobs.top) == pytest.approx(dict(enumerate(expected.tolist())))
    assert token.logprobs.chosen == float(expected.max())


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -0.1}, "temperature must be a finite number of at least 0"),
        ({"temperature": float("nan")}, "temperature must be a finite number"),
        ({"temperature": float("inf")}, "temperature must be a finite number"),
        ({"top_p": 0.0}, "top_p must be above 0"),
        ({"top_p": 1.1}, "top_p must be above 0 and at most 1"),
        ({"top_p": float("nan")}, "top_p must be above 0"),
        ({"top_k": -1}, "top_k must be at least 0"),
        ({"min_p": -0.1}, "min_p must be from 0 to 1"),
        ({"min_p": 1.5}, "min_p must be from 0 to 1"),
        ({"logprobs": -1}, "logprobs must be at least 0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1"),
    ],
    ids=str,
)
def test_parameters_without_a_meaning_are_refused(make_engine, recorder, params, message):
    engine = make_engine(observer=recorder)
    with pytest.raises(InvalidArgument, match=message):
        engine.submit("r", PROMPT, SamplingParams(**params))
    assert recorder.log == [] and not engine.has_work()
