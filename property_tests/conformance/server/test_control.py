"""The control plane: each call is answered after its effect, or refused with a status code and a reason."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

from engine.server import ServerConfig

from .clients import LONG, SHORT, call, metric, raw, refused, streaming
from .servers import serving


def swap(client: httpx.Client, folder: Path, version: str) -> None:
    call(client, "/start_weight_update")
    call(client, "/update_weights", json={"update_info": {"path": str(folder)}})
    call(client, "/finish_weight_update", json={"weight_version": version})


def test_without_dev_mode_there_is_no_control_plane(tiny: Path):
    with serving(tiny, config={"dev_mode": False}) as server, httpx.Client(base_url=server.url) as client:
        assert client.post("/v1/completions", json=SHORT).status_code == 200
        assert refused(client, "/pause") == (404, "not-found")
        assert "/pause" not in client.get("/openapi.json").json()["paths"]


def test_keep_freezes_a_stream_which_goes_on_under_the_new_version(client: httpx.Client, other_weights: Path, tiny: Path):
    whole = call(client, "/v1/completions", json=LONG)["choices"][0]["token_ids"]
    with streaming(client) as rest:
        assert call(client, "/pause", params={"mode": "keep"}) == {"status": "paused"}
        assert client.get("/is_paused").json() == {"is_paused": True}
        assert client.get("/health").json() == {"status": "paused"}
        swap(client, other_weights, "v2")
        assert client.get("/weight_info").json() == {"weight_version": "v2"}
        assert call(client, "/resume") == {"status": "resumed"}
        choices = rest()
    tokens = [token for choice in choices for token in choice["token_ids"]]
    first, second = choices[-1]["weight_versions"]
    assert (first["version"], first["start"], second["version"], second["end"]) == ("default", 0, "v2", 400)
    assert first["end"] == second["start"]
    assert tokens[: first["end"]] == whole[: first["end"]]
    assert tokens != whole
    call(client, "/pause")
    swap(client, tiny, "default")


def test_abort_ends_a_stream_with_what_it_has_and_frees_its_blocks(client: httpx.Client):
    with streaming(client) as rest:
        call(client, "/pause", params={"mode": "abort"})
        choices = rest()
    assert choices[-1]["finish_reason"] == "abort"
    assert len([token for choice in choices for token in choice["token_ids"]]) < 400
    assert metric(client, "kv_cache_usage_perc") == 0


def test_wait_runs_a_stream_to_its_end(client: httpx.Client):
    with streaming(client, max_tokens=60) as rest:
        call(client, "/pause", params={"mode": "wait"})
        assert len([token for choice in rest() for token in choice["token_ids"]]) == 60


@pytest.mark.parametrize("attempt", range(5))
def test_every_output_is_written_to_its_client_before_a_pause_is_answered(client: httpx.Client, attempt: int):
    address = (client.base_url.host, client.base_url.port)
    body = json.dumps({**LONG, "stream": True, "prompt": [[5, 6, 7 + attempt], [9, 9]], "n": 2})
    with socket.create_connection(address) as ours:
        ours.sendall(raw("/v1/completions", body))
        seen = b""
        while b"token_ids" not in seen:
            seen += ours.recv(1 << 16)
        call(client, "/pause", params={"mode": "abort"})
        ours.setblocking(False)  # all of it is here, or was not written in time
        while b"[DONE]" not in seen:
            seen += ours.recv(1 << 20)
    assert seen.count(b'"finish_reason":"abort"') == 4


def test_a_call_that_a_later_one_overrides_is_a_409(client: httpx.Client):
    with streaming(client):
        overridden: list[tuple[int, str]] = []
        waiting = Thread(target=lambda: overridden.append(refused(client, "/pause", params={"mode": "wait"})))
        waiting.start()
        while not client.get("/is_paused").json()["is_paused"]:
            pass
        call(client, "/resume")
        waiting.join()
    assert overridden == [(409, "superseded")]


def test_requests_are_aborted_by_their_ids(client: httpx.Client):
    header = {"X-Request-Id": "doomed"}
    call(client, "/pause", params={"mode": "keep"})
    answers: list[dict[str, Any]] = []
    body = {**LONG, "prompt": [[1, 2], [3, 4]], "n": 2}
    asking = Thread(target=lambda: answers.append(call(client, "/v1/completions", json=body, headers=header)))
    asking.start()
    while metric(client, "num_requests_parked") != 4:
        pass
    assert call(client, "/abort_requests", json={"request_ids": ["cmpl-doomed-1", "cmpl-unknown-0"]}) == {"status": "aborted", "aborted": 2}
    assert call(client, "/abort_requests", json={"request_ids": ["cmpl-doomed-1"]}) == {"status": "aborted", "aborted": 0}
    assert call(client, "/abort_requests", json={}) == {"status": "aborted", "aborted": 2}
    asking.join()
    assert [choice["finish_reason"] for choice in answers[0]["choices"]] == ["abort"] * 4


JSON = {"Content-Type": "application/json"}
BAD_ARGUMENTS = {
    "an unknown mode": ("/pause", {"params": {"mode": "freeze"}}, "mode"),
    "a misspelt parameter": ("/pause", {"params": {"moed": "keep"}}, "moed"),
    "the mode in a body": ("/pause", {"json": {"mode": "keep"}}, "mode"),
    "a flag that is none": ("/pause", {"params": {"clear_cache": "perhaps"}}, "clear_cache"),
    "no ids": ("/abort_requests", {"json": {"request_ids": []}}, "request_ids"),
    "ids that are numbers": ("/abort_requests", {"json": {"request_ids": [1]}}, "request_ids"),
    "half a character": ("/abort_requests", {"content": rb'{"request_ids": ["\ud800"]}', "headers": JSON}, r"\ud800"),
    "a field called so": ("/abort_requests", {"content": rb'{"\ud800": 1}', "headers": JSON}, r"\ud800"),
    "a model called so": ("/v1/completions", {"content": rb'{"prompt": [1], "model": "\ud800"}', "headers": JSON}, r"\ud800"),
    "an unknown backend": ("/init_weight_transfer_engine", {"json": {"init_info": {"backend": "nccl"}}}, "backend"),
    "a pickle": ("/update_weights", {"json": {"update_info": {"ipc_handles_pickled": "gASVAA=="}}}, "ipc_handles_pickled"),
    "an empty version": ("/finish_weight_update", {"json": {"weight_version": ""}}, "weight_version"),
    "a version that is a number": ("/update_weight_version", {"json": {"new_version": 2}}, "new_version"),
    "an unknown action": ("/weight_checker", {"json": {"action": "dance"}}, "action"),
    "a comparison with nothing": ("/weight_checker", {"json": {"action": "compare"}}, "baseline"),
    "a level that there is not": ("/sleep", {"params": {"level": 3}}, "level"),
    "a tag that there is not": ("/wake_up", {"params": {"tags": "everything"}}, "tags"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_a_bad_argument_is_a_400_that_names_it_and_changes_nothing(client: httpx.Client, name: str):
    path, options, named = BAD_ARGUMENTS[name]
    before = client.get("/metrics").text
    answer = client.post(path, **options)
    assert answer.status_code == 400, answer.text
    assert named in answer.json()["error"]["message"]
    assert client.get("/metrics").text == before


def test_a_call_in_the_wrong_state_is_a_409(client: httpx.Client, tiny: Path):
    update = {"json": {"update_info": {"path": str(tiny)}}}
    assert refused(client, "/start_weight_update") == (409, "conflict")
    assert refused(client, "/update_weights", **update) == (409, "conflict")
    assert refused(client, "/finish_weight_update") == (409, "conflict")
    assert refused(client, "/update_weight_version", json={"new_version": "v9"}) == (409, "conflict")
    assert refused(client, "/weight_checker", json={"action": "reset"}) == (409, "conflict")
    call(client, "/pause")
    call(client, "/start_weight_update")
    assert refused(client, "/start_weight_update") == (409, "conflict")
    assert refused(client, "/resume") == (409, "conflict")
    assert refused(client, "/sleep") == (409, "conflict")
    call(client, "/update_weights", **update)
    call(client, "/finish_weight_update")


def test_a_reset_while_requests_hold_blocks_is_a_409_and_empties_the_cache_when_none_does(client: httpx.Client):
    with streaming(client):
        assert refused(client, "/reset_prefix_cache") == (409, "busy")
        call(client, "/pause", params={"mode": "keep", "clear_cache": False})
        assert call(client, "/reset_prefix_cache") == {"success": True}
        assert metric(client, "kv_cache_usage_perc") == 0
    for path in ("/reset_mm_cache", "/reset_encoder_cache"):
        assert call(client, path) == {"success": True}


def test_parts_that_are_counted_must_all_be_sent(client: httpx.Client, tiny: Path, tmp_path: Path):
    tensors = load_file(tiny / "model.safetensors")
    for part, names in ((1, sorted(tensors)[::2]), (2, sorted(tensors)[1::2])):
        (tmp_path / str(part)).mkdir()
        save_file({name: tensors[name] for name in names}, tmp_path / str(part) / "model.safetensors")
    sent = [{"update_info": {"path": str(tmp_path / str(part)), "part": part, "of": 2}} for part in (1, 2)]
    call(client, "/init_weight_transfer_engine", json={"init_info": {}})
    call(client, "/pause")
    call(client, "/start_weight_update")
    call(client, "/update_weights", json=sent[0])
    assert refused(client, "/finish_weight_update") == (409, "conflict")
    call(client, "/update_weights", json=sent[1])
    call(client, "/finish_weight_update")
    call(client, "/shutdown_weight_transfer_engine")


def test_out_of_service_after_half_an_update_until_a_full_one(client: httpx.Client, tiny: Path, tmp_path: Path):
    tensors = load_file(tiny / "model.safetensors")
    name = sorted(tensors)[-1]
    save_file({**tensors, name: tensors[name][..., :-1].contiguous()}, tmp_path / "model.safetensors")
    call(client, "/pause", params={"mode": "keep"})
    call(client, "/start_weight_update")
    assert refused(client, "/update_weights", json={"update_info": {"path": str(tmp_path)}}) == (400, "failed")
    health = client.get("/health")
    assert (health.status_code, health.json()["error"]["type"]) == (503, "out-of-service")
    assert refused(client, "/resume") == (409, "out-of-service")
    swap(client, tiny, "default")
    assert client.get("/health").json() == {"status": "paused"}


def test_a_source_that_is_not_there_is_a_400_and_the_session_stays_open(client: httpx.Client, tiny: Path, tmp_path: Path):
    call(client, "/pause")
    call(client, "/start_weight_update")
    assert refused(client, "/update_weights", json={"update_info": {"path": str(tmp_path / "nowhere")}}) == (400, "invalid")
    call(client, "/update_weights", json={"update_info": {"path": str(tiny)}})
    call(client, "/finish_weight_update")


def test_checksums_tell_whether_weights_arrived(client: httpx.Client, tiny: Path, other_weights: Path):
    ours = call(client, "/weight_checker", json={"action": "checksum"})["checksums"]
    call(client, "/pause")
    call(client, "/weight_checker", json={"action": "reset"})
    compared = call(client, "/weight_checker", json={"action": "compare", "baseline": ours})
    assert (compared["match"], compared["mismatches"]) == (False, sorted(ours))
    assert client.get("/health").status_code == 503
    swap(client, tiny, "default")
    assert call(client, "/weight_checker", json={"action": "compare", "baseline": ours}) == {"match": True, "mismatches": []}


def test_sleep_and_wake(client: httpx.Client):
    with streaming(client, max_tokens=60) as rest:
        call(client, "/pause", params={"mode": "keep"})
        assert call(client, "/sleep", params={"level": 1}) == {"status": "sleeping"}
        assert client.get("/is_sleeping").json() == {"is_sleeping": True}
        assert client.get("/health").json() == {"status": "sleeping"}
        assert refused(client, "/resume") == (409, "conflict")
        assert call(client, "/wake_up", params={"tags": ["weights"]}) == {"status": "sleeping"}
        assert call(client, "/wake_up") == {"status": "awake"}
        call(client, "/resume")
        assert len([token for choice in rest() for token in choice["token_ids"]]) == 60


def test_late_requests_are_refused_for_a_while_under_reject(tiny: Path):
    with serving(tiny, late_requests="reject") as server, httpx.Client(base_url=server.url) as client:
        call(client, "/pause", params={"mode": "keep"})
        for stream in (False, True):
            answer = client.post("/v1/completions", json={**SHORT, "stream": stream})
            assert (answer.status_code, answer.json()["error"]["type"]) == (503, "rejected")
            assert int(answer.headers["Retry-After"]) > 0
        call(client, "/resume")
        assert client.post("/v1/completions", json=SHORT).status_code == 200


@pytest.mark.parametrize("late_requests", ["queue", "block"])
def test_a_late_stream_begins_at_once_and_runs_after_the_resume(tiny: Path, late_requests: str):
    with serving(tiny, late_requests=late_requests) as server, httpx.Client(base_url=server.url) as client:
        call(client, "/pause", params={"mode": "keep"})
        with httpx.stream("POST", f"{server.url}/v1/completions", json={**SHORT, "stream": True}) as stream:
            assert stream.status_code == 200
            assert metric(client, {"queue": "num_requests_parked", "block": "num_requests_blocked"}[late_requests]) == 1
            call(client, "/resume")
            assert stream.read().endswith(b"data: [DONE]\n\n")


def test_world_size(client: httpx.Client):
    assert client.get("/get_world_size", params={"include_dp": False}).json() == {"world_size": 1}


def test_metrics_follow_the_engine(client: httpx.Client, tiny: Path):
    tokens, prompts = metric(client, "generation_tokens_total"), metric(client, "prompt_tokens_total")
    call(client, "/v1/completions", json=SHORT)
    assert (metric(client, "generation_tokens_total") - tokens, metric(client, "prompt_tokens_total") - prompts) == (3, 4)
    updates = metric(client, 'weight_operation_seconds_count{operation="update",outcome="done"}')
    call(client, "/pause", params={"mode": "keep"})
    assert metric(client, 'paused{mode="keep"}') == 1
    swap(client, tiny, "v7")
    assert metric(client, 'weight_version_info{version="v7"}') == 1
    assert metric(client, 'weight_operation_seconds_count{operation="update",outcome="done"}') == updates + 1


def test_a_server_with_a_key_wants_it_on_all_but_probes(tiny: Path):
    with serving(tiny, config={"api_key": "secret"}) as server:
        for headers, expected in (({}, 401), ({"Authorization": "Bearer wrong"}, 401), ({"Authorization": "Bearer secret"}, 200)):
            with httpx.Client(base_url=server.url, headers=headers) as client:
                answers = [
                    client.post("/pause"),
                    client.post("/resume"),
                    client.get("/v1/models"),
                    client.post("/v1/completions", json=SHORT),
                ]
                assert [answer.status_code for answer in answers] == [expected] * 4
                assert [client.get(path).status_code for path in ("/health", "/metrics")] == [200, 200]


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::", "example.org"])
def test_a_control_plane_for_other_machines_wants_a_key(host: str):
    with pytest.raises(ValueError, match="API key"):
        ServerConfig(served_model_name="tiny", host=host, dev_mode=True)
    ServerConfig(served_model_name="tiny", host=host, dev_mode=True, api_key="secret")
    ServerConfig(served_model_name="tiny", host=host)
    for loopback in ("127.0.0.1", "127.1.2.3", "::1", "localhost"):
        ServerConfig(served_model_name="tiny", host=loopback, dev_mode=True)
