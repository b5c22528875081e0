"""What each dialect makes of a server's events, errors and counters."""

from __future__ import annotations

import pytest

pytest.importorskip("httpx", reason="the extra `check` is not installed")

from harness.backends import BackendError, CallRefused
from harness.backends.http import BrokenProtocol, Client, Reply
from harness.backends.http.contract import CaesuraDialect, VllmDialect
from harness.backends.http.dialect import Card, Chunk, refuse
from harness.backends.http.sglang import SglangDialect
from harness.check.metrics import Metrics, parse_metrics
from harness.check.tracing import recognise
from harness.operations import Abort, Pause, Prompt, Submit, SwapWeights, UpdateWeights, UpdateWeightVersion, WeightSource
from harness.tracer import CodeBook

CARD = Card(model="m", root="/weights/v1", max_model_len=64, versions={}, paths=frozenset({"/abort_requests", "/update_weights_from_disk"}))
SUBMIT = Submit(id="r1", prompt=Prompt(tokens=(1, 2)), max_tokens=3, cache_salt="s")
SHORT = WeightSource(checkpoint="/weights/v2")


@pytest.fixture
def client() -> Client:
    return Client("http://127.0.0.1:1")


def test_completions_events_are_deltas_and_the_last_has_the_counts(client: Client):
    dialect = CaesuraDialect(client, CARD)
    last = {"index": 0, "token_ids": [7], "finish_reason": "length", "weight_versions": [{"version": "v1", "start": 0, "end": 3}]}
    usage = {"prompt_tokens": 2, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}}
    first, middle, end = (
        dialect.read(event, 0) for event in ({"choices": [{"token_ids": [5, 6]}]}, {"choices": [last]}, {"choices": [], "usage": usage})
    )
    assert first == Chunk((5, 6))
    assert end.over(middle.over(first)) == Chunk((), "length", 2, 3, 1, (("v1", 0, 3),))


def test_an_event_that_is_an_error_refuses_the_request(client: Client):
    with pytest.raises(CallRefused) as refusal:
        CaesuraDialect(client, CARD).read({"error": {"type": "out-of-service", "code": 409, "message": "an update failed"}}, 0)
    assert [refusal.value.code, refusal.value.status] == ["out-of-service", 409]


@pytest.mark.parametrize("event", [[], {"choices": [{"text": "no ids"}]}, {"choices": [{"token_ids": [1], "finish_reason": "error"}]}])
def test_an_event_without_meaning_is_no_token(client: Client, event: object):
    with pytest.raises(BrokenProtocol):
        VllmDialect(client, CARD).read(event, 0)


def test_sglang_tells_all_tokens_or_the_new_ones(client: Client):
    dialect = SglangDialect(client, CARD)

    def event(tokens: list[int], count: int, reason: str | None = None) -> dict:
        finish = {"type": reason} if reason else None
        return {
            "output_ids": tokens,
            "meta_info": {"completion_tokens": count, "prompt_tokens": 2, "cached_tokens": 0, "finish_reason": finish},
        }

    assert dialect.read(event([5, 6, 7], 3), 2).tokens == (7,)
    assert dialect.read(event([7], 3), 2).tokens == (7,)
    assert dialect.read(event([5, 6, 7], 3, "abort"), 3) == Chunk((), "abort", 2, 3, 0)


def test_each_dialect_names_a_request_so_that_its_abort_reaches_it_alone(client: Client):
    assert CaesuraDialect(client, CARD).submit(SUBMIT).headers == {"X-Request-Id": "r1"}
    assert CaesuraDialect(client, CARD).request_id("r1") == "cmpl-r1-0"
    sglang = SglangDialect(client, CARD)
    assert sglang.submit(SUBMIT).body["rid"] == sglang.request_id("r1")
    assert not sglang.request_id("r10").startswith(sglang.request_id("r1"))
    vllm = VllmDialect(client, CARD)
    vllm.token_api = True
    assert [vllm.submit(SUBMIT).path, vllm.request_id("r1")] == ["/inference/v1/generate", "generate-tokens-r1"]


def test_what_a_server_cannot_be_asked_is_said_before_it_is_asked(client: Client):
    sglang, vllm, ours = SglangDialect(client, CARD), VllmDialect(client, CARD), CaesuraDialect(client, CARD)
    vllm.sessions = False
    assert "wait" in (sglang.cannot(Pause(mode="wait")) or "")
    assert sglang.cannot(Pause(mode="keep")) is None
    assert sglang.cannot(UpdateWeights(source=SHORT)) == "be asked for update_weights over HTTP"
    assert sglang.cannot(SwapWeights(source=SHORT)) is None
    assert "neither a transfer backend" in (vllm.cannot(SwapWeights(source=SHORT)) or "")
    assert "from 0.27" in (vllm.cannot(UpdateWeightVersion(version="v")) or "")
    assert ours.cannot(Abort(ids=("r1",))) is None
    assert "in parts" in (ours.cannot(UpdateWeights(source=SHORT, part=1, of=2)) or "")
    assert "fail" in (ours.cannot(SwapWeights(source=SHORT, fails=True)) or "")


@pytest.mark.parametrize(
    ("status", "body", "code", "words"),
    [
        (409, {"error": {"type": "superseded", "message": "overridden"}}, "superseded", "overridden"),
        (503, {"detail": "paused"}, "rejected", "paused"),
        (500, "Internal\nServer Error", "failed", "Internal Server Error"),
        (422, {"detail": [{"loc": ["query", "mode"]}]}, "invalid", "mode"),
    ],
)
def test_an_error_is_read_wherever_a_framework_puts_it(status: int, body: object, code: str, words: str):
    with pytest.raises(CallRefused) as refusal:
        refuse(Reply("POST /pause", status, body))
    assert [refusal.value.code, refusal.value.status] == [code, status]
    assert words in str(refusal.value)


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "http://", "not a url"])
def test_what_is_no_url_is_refused(url: str):
    with pytest.raises(BackendError, match="expected a"):
        Client(url)


def test_counters_are_found_under_any_prefix_and_summed_over_ranks():
    text = 'vllm:num_requests_running{engine="0"} 2.0\nvllm:num_requests_running{engine="1"} 1.0\n# HELP x y\nsglang:num_queue_reqs 4\n'
    text += 'vllm:external_prefix_cache_hits_total 9\nvllm:prefix_cache_hits_total{engine="0"} 32'
    assert parse_metrics(text) == Metrics(running=3.0, waiting=4.0, hits=32.0)
    assert parse_metrics("") == Metrics(None, None, None)


def test_a_tracer_is_recognised_by_its_tokens_alone():
    book, prompt = CodeBook(versions=4), (16, 17)
    second = book.prompt_tokens + book.levels * book.period
    assert (found := recognise(prompt, [second + 18, second + 19], {})) is not None and found.version == "v2"
    assert recognise(prompt, [second + 18, second + 21], {}) is None
    assert recognise(prompt, [18, 19], {}) is None
    assert recognise(prompt, [10**6, 10**6 + 1], {}) is None
