"""A load for `locust`, while somebody pauses and resumes: completions, streamed and whole, that must all come back whole."""

from __future__ import annotations

import json

from locust import HttpUser, constant, task

BODY = {"prompt": [5, 6, 7, 8], "max_tokens": 20, "temperature": 0, "return_token_ids": True}


class Client(HttpUser):
    wait_time = constant(0)

    @task
    def whole(self) -> None:
        with self.client.post("/v1/completions", json=BODY, name="whole", catch_response=True) as answer:
            self.judge(answer, [answer.json()] if answer.ok else [])

    @task
    def streamed(self) -> None:
        with self.client.post("/v1/completions", json={**BODY, "stream": True}, name="streamed", catch_response=True) as answer:
            lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line and not line.endswith("[DONE]")]
            self.judge(answer, map(json.loads, lines))

    def judge(self, answer, events) -> None:
        tokens = sum(len(event["choices"][0]["token_ids"]) for event in events)
        if answer.ok and tokens != BODY["max_tokens"]:
            answer.failure(f"{tokens} tokens, expected {BODY['max_tokens']}")
