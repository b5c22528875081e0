"""`caesura serve --log`: what clients ask for is in the log, which holds; one that cannot be written ends, and nothing else."""

from __future__ import annotations

import resource
import signal
from pathlib import Path

import httpx
import pytest
from safetensors.torch import load_file, save_file

from harness.cli import main
from harness.log import read_log
from harness.trial import review

from .clients import LONG, SHORT, call, refused, streaming
from .test_serve_verb import serve

DEV_MODE = {"CAESURA_SERVER_DEV_MODE": "1"}
NO_HANDLE = "Root=1-67891233/abcdef;" + 100 * "x"
"""An id that no log can have as it is."""


def halves(folder: Path, out: Path) -> list[Path]:
    """A checkpoint's weights in two folders."""
    tensors = load_file(folder / "model.safetensors")
    names = sorted(tensors)
    for half, chosen in (("first", names[::2]), ("second", names[1::2])):
        (out / half).mkdir(parents=True)
        save_file({name: tensors[name] for name in chosen}, out / half / "model.safetensors")
    return [out / "first", out / "second"]


def update(client: httpx.Client, *folders: Path, counted: bool = False) -> None:
    call(client, "/start_weight_update")
    for part, folder in enumerate(folders, start=1):
        count = {"part": part, "of": len(folders)} if counted else {}
        call(client, "/update_weights", json={"update_info": {"path": str(folder), **count}})
    call(client, "/finish_weight_update", json={"weight_version": "v2"})


def ask_for_requests(client: httpx.Client) -> None:
    call(client, "/v1/completions", json={**SHORT, "n": 2, "temperature": 1, "seed": 7, "logprobs": 1})
    call(client, "/v1/completions", json=SHORT, headers={"X-Request-Id": NO_HANDLE})
    assert refused(client, "/v1/completions", json={**SHORT, "prompt": [1_000_000]}) == (400, "invalid")
    assert call(client, "/abort_requests", json={"request_ids": ["nobody's", "", NO_HANDLE]}) == {"status": "aborted", "aborted": 0}
    for _ in range(2):
        stream = client.build_request("POST", "/v1/completions", json={**LONG, "stream": True}, headers={"X-Request-Id": NO_HANDLE})
        client.send(stream, stream=True).close()  # hung up
    with streaming(client):
        assert refused(client, "/reset_prefix_cache") == (409, "busy")
        call(client, "/pause", params={"mode": "keep", "clear_cache": "false"})
        call(client, "/abort_requests")
    call(client, "/resume")


def ask_for_updates(client: httpx.Client, whole: Path, parts: list[Path], spoilt: Path) -> None:
    assert refused(client, "/start_weight_update") == (409, "conflict")
    with streaming(client) as rest:
        call(client, "/pause", params={"mode": "keep"})
        call(client, "/start_weight_update")
        for nowhere in (whole / "nowhere", spoilt):
            assert client.post("/update_weights", json={"update_info": {"path": str(nowhere)}}).status_code == 400
        call(client, "/finish_weight_update")
        update(client, *parts)
        update(client, *parts, counted=True)
        call(client, "/resume")
        assert [span["version"] for span in rest()[-1]["weight_versions"]] == ["default", "v2"]
    call(client, "/sleep", params={"level": 1, "mode": "wait"})
    call(client, "/wake_up", params={"tags": "weights"})
    call(client, "/wake_up")
    call(client, "/pause")
    call(client, "/weight_checker", json={"action": "reset"})
    call(client, "/start_weight_update")
    call(client, "/update_weights", json={"update_info": {"path": str(parts[0])}})
    assert refused(client, "/finish_weight_update") == (409, "conflict")
    call(client, "/update_weights", json={"update_info": {"path": str(parts[1])}})
    call(client, "/finish_weight_update", json={"weight_version": "v2"})
    call(client, "/resume")


def test_a_server_writes_a_log_that_holds_whatever_its_clients_do(tiny: Path, other_weights: Path, tmp_path: Path):
    spoilt = tmp_path / "spoilt"
    spoilt.mkdir()
    save_file({"of.another.model": next(iter(load_file(tiny / "model.safetensors").values()))}, spoilt / "model.safetensors")
    parts, log = halves(other_weights, tmp_path / "halves"), tmp_path / "log"
    options = ["--log", str(log), "--drain", "0", "--async-scheduling"]
    with serve("tiny", *options, **DEV_MODE) as (process, url), httpx.Client(base_url=url, timeout=60) as client:
        ask_for_requests(client)
        ask_for_updates(client, other_weights, parts, spoilt)
        with streaming(client, max_tokens=1000):
            process.send_signal(signal.SIGTERM)
            process.wait()
    trial = review(read_log(log), None)
    assert (trial.verdict.status, trial.verdict.reasons) == ("holds", ())
    assert trial.closed is not None and trial.closed.why == "drained"
    assert {judgement.invariant for judgement in trial.verdict.judgements if judgement.status == "not-checkable"} == {
        "golden",
        "weight-equality",
    }


def test_a_full_disk_ends_the_recording_and_not_the_serving(tiny: Path, tmp_path: Path):
    def small_disk() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))

    log = tmp_path / "log"
    with (
        serve("tiny", "--log", str(log), before=small_disk, **DEV_MODE) as (process, url),
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        whole = call(client, "/v1/completions", json=LONG)["choices"][0]["token_ids"]
        for _ in range(5):
            call(client, "/pause", params={"mode": "keep"})
            call(client, "/resume")
            assert call(client, "/v1/completions", json=LONG)["choices"][0]["token_ids"] == whole
        process.send_signal(signal.SIGTERM)
        process.wait()
        assert process.stderr is not None
        warnings = [line for line in process.stderr if "recording stops, the engine goes on" in line]
    assert len(warnings) == 1 and "is the disk full?" in warnings[0]
    recorded = read_log(log)
    assert recorded.torn is not None and not recorded.closed


def test_a_log_is_not_written_over(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "events.r0.jsonl").write_text("of yesterday\n")
    with pytest.raises(SystemExit) as ended:
        main(["serve", "tiny", "--port", "0", "--in-process", "--log", str(tmp_path)])
    assert ended.value.code == 64 and "give the run a new folder" in capsys.readouterr().err
