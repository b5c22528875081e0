"""`/v1/completions`: the same tokens however they are asked for, numbered and named as OpenAI's and vLLM's clients expect."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import httpx
import openai
import pytest

from engine.server import Server

GREEDY = {"prompt": [5, 6, 7, 8], "max_tokens": 12, "temperature": 0, "return_token_ids": True}


def complete(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={**GREEDY, **fields})
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(client: httpx.Client, **fields: Any) -> list[dict[str, Any]]:
    """The events of a streamed completion; the mark of its end is checked and left out."""
    answer = client.post("/v1/completions", json={**GREEDY, **fields, "stream": True})
    assert answer.status_code == 200, answer.text
    *data, last = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert last == "[DONE]"
    return [json.loads(line) for line in data]


def test_a_stream_joined_is_the_whole_answer(client: httpx.Client):
    whole = complete(client, logprobs=2)["choices"][0]
    parts = [event["choices"][0] for event in events(client, logprobs=2)]
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    assert "".join(part["text"] for part in parts) == whole["text"]
    assert parts[-1]["weight_versions"] == whole["weight_versions"] == [{"version": "default", "start": 0, "end": 12}]
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + ["length"]
    assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"] == GREEDY["prompt"]
    assert not any("prompt_token_ids" in part for part in parts[1:])
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [entry for part in parts for entry in part["logprobs"][name]] == whole["logprobs"][name]


def test_text_without_a_tokenizer_is_its_bytes(client: httpx.Client):
    text = complete(client, prompt="Ä!")["choices"][0]
    tokens = complete(client, prompt=list("Ä!".encode()))["choices"][0]
    assert text["token_ids"] == tokens["token_ids"]
    assert text["prompt_token_ids"] == [0xC3, 0x84, 0x21]


def test_choices_are_numbered_prompt_by_prompt(client: httpx.Client):
    both = complete(client, prompt=[[1, 2, 3], [9, 8]], n=2, temperature=1, seed=4)
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]
    for index, prompt in enumerate(([1, 2, 3], [9, 8])):
        alone = complete(client, prompt=prompt, n=2, temperature=1, seed=4)
        assert [c["token_ids"] for c in both["choices"][2 * index : 2 * index + 2]] == [c["token_ids"] for c in alone["choices"]]
    assert both["usage"] == {"prompt_tokens": 5, "completion_tokens": 48, "total_tokens": 53}


def test_each_event_has_news_of_one_choice(client: httpx.Client):
    seen = events(client, prompt=[[1, 2, 3], [9, 8]], n=2)
    assert all(len(event["choices"]) == 1 for event in seen)
    assert {event["choices"][0]["index"] for event in seen} == {0, 1, 2, 3}


def test_usage_comes_last_when_it_is_asked_for(client: httpx.Client):
    *_, last = events(client, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 4, "completion_tokens": 12, "total_tokens": 16}


def test_a_seed_repeats_what_no_seed_varies(client: httpx.Client):
    draws = [complete(client, temperature=1, seed=seed)["choices"][0]["token_ids"] for seed in (3, 3, 4)]
    assert draws[0] == draws[1] != draws[2]
    unseeded = [complete(client, temperature=1)["choices"][0]["token_ids"] for _ in range(2)]
    assert unseeded[0] != unseeded[1]


def test_logprobs_name_each_token_once_and_the_sampled_one_always(client: httpx.Client):
    choice = complete(client, logprobs=0, temperature=1, seed=1)["choices"][0]
    assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
    assert choice["logprobs"]["top_logprobs"] == [
        {name: value} for name, value in zip(choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"], strict=True)
    ]
    widths = [len(name) for name in choice["logprobs"]["tokens"]]
    assert [b - a for a, b in pairwise(choice["logprobs"]["text_offset"])] == widths[:-1]


def test_without_max_tokens_a_request_runs_to_the_model_length(client: httpx.Client):
    assert complete(client, prompt=[3] * 500, max_tokens=None)["usage"]["total_tokens"] == 512


def test_openai_s_client_reads_whole_answers_and_streams(client: httpx.Client, server: Server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as ours:
        assert [model.id for model in ours.models.list()] == ["tiny"]
        whole = ours.completions.create(model="tiny", prompt="Hello", max_tokens=8, temperature=0)
        stream = ours.completions.create(model="tiny", prompt="Hello", max_tokens=8, temperature=0, stream=True)
        parts = [event.choices[0] for event in stream]
        assert "".join(part.text for part in parts) == whole.choices[0].text
        assert parts[-1].finish_reason == whole.choices[0].finish_reason == "length"
        assert whole.usage is not None and whole.usage.completion_tokens == 8
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            ours.completions.create(model="tiny", prompt="Hello", max_tokens=0)
        with pytest.raises(openai.NotFoundError, match="no model 'gpt'"):
            ours.completions.create(model="gpt", prompt="Hello")


BAD = {
    "no prompt": ({"prompt": None}, "prompt"),
    "an empty prompt": ({"prompt": []}, "prompt"),
    "an empty text": ({"prompt": ""}, "prompt"),
    "text and tokens mixed": ({"prompt": ["a", 1]}, "prompt"),
    "a negative token": ({"prompt": [-1]}, "prompt"),
    "a token outside the vocabulary": ({"prompt": [512]}, "vocabulary"),
    "a huge token": ({"prompt": [2**70]}, "prompt"),
    "a prompt as long as the model": ({"prompt": [1] * 512}, "max_model_len"),
    "no tokens": ({"max_tokens": 0}, "max_tokens"),
    "tokens as text": ({"max_tokens": "12"}, "max_tokens"),
    "half a token": ({"max_tokens": 1.5}, "max_tokens"),
    "a truth as a number": ({"n": True}, "n:"),
    "no choices": ({"n": 0}, "n:"),
    "cold": ({"temperature": -0.1}, "temperature"),
    "top_p of nothing": ({"top_p": 0}, "top_p"),
    "min_p above one": ({"min_p": 1.1}, "min_p"),
    "a seed beyond 64 bits": ({"seed": 2**63}, "seed"),
    "a salt that is none": ({"cache_salt": ""}, "cache_salt"),
    "an unknown field": ({"max_tokenz": 5}, "max_tokenz"),
    "a parameter that this engine does not have": ({"frequency_penalty": 0.5}, "frequency_penalty"),
    "stop strings": ({"stop": ["."]}, "stop"),
    "options of a stream that is none": ({"stream_options": {"include_usage": True}}, "stream_options"),
    "a lone surrogate": ({"prompt": "\ud800"}, "prompt"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_a_400_that_names_what_is_wrong(client: httpx.Client, name: str):
    fields, named = BAD[name]
    answer = client.post("/v1/completions", content=json.dumps({**GREEDY, **fields}), headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (400, "invalid", 400)
    assert named in error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe", b'{"prompt": NaN}', b"[" * 100_000])
def test_a_body_that_is_no_json_object_is_a_400(client: httpx.Client, body: bytes):
    answer = client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid")


def test_a_body_beyond_the_limit_is_a_413_whether_its_length_is_announced_or_not(client: httpx.Client):
    big = b'{"prompt": "' + b"x" * (5 << 20) + b'"}'
    for content in (big, iter([big[: 1 << 20]] * 6)):
        answer = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 413, answer.text
    assert complete(client)["choices"]


def test_an_id_is_free_again_when_its_request_has_ended_and_not_before(client: httpx.Client, server: Server):
    header = {"X-Request-Id": "mine"}
    client.post("/pause", params={"mode": "keep"}).raise_for_status()
    with client.stream("POST", "/v1/completions", json={**GREEDY, "stream": True}, headers=header) as stream:
        twice = httpx.post(f"{server.url}/v1/completions", json=GREEDY, headers=header)
        assert twice.status_code == 400
        assert "'cmpl-mine-0' exists already" in twice.json()["error"]["message"]
        httpx.post(f"{server.url}/resume").raise_for_status()
        assert '"finish_reason":"length"' in stream.read().decode()
    answer = client.post("/v1/completions", json=GREEDY, headers=header)
    assert (answer.status_code, answer.json()["id"]) == (200, "cmpl-mine")
