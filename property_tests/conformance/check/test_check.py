"""`caesura check` against servers that keep the promises, and against servers that break one."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("httpx", reason="the extra `check` is not installed")
pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from harness.backends.http import HttpBackend
from harness.check.inspection import Found, Inspection
from harness.check.promise import CHECKS
from harness.check.tracing import find_folders
from harness.cli import main
from harness.log import read_log
from harness.tracer import CodeBook
from harness.tracer.decode import write_file

from .fake_engine import FakeEngine
from .fake_server import Kind, serving

BOOK = CodeBook(versions=2, context=1024)


@pytest.fixture
def tracer(tmp_path: Path) -> Path:
    """A tracer's folders, with all that the toy server reads of them."""
    for version in ("v1", "v2"):
        (tmp_path / "tracer" / version).mkdir(parents=True)
        write_file(tmp_path / "tracer" / version, BOOK, version)
    return tmp_path / "tracer"


def inspect(url: str, tracer: Path | None = None, *only: str) -> Found:
    async def run() -> Found:
        backend = HttpBackend(url, timeout_s=5.0)
        folders = find_folders(tracer) if tracer else {}
        try:
            return await Inspection(backend, timeout_s=5.0, folders=folders, only=only).run(
                lambda backend, info: lambda event: None, lambda row: None
            )
        finally:
            await backend.stop()

    return asyncio.run(run())


def verdicts(found: Found) -> dict[str, str]:
    return {row.id: row.verdict for row in found.rows}


def evidence(found: Found, verdict: str) -> dict[str, str]:
    return {row.id: row.evidence for row in found.rows if row.verdict == verdict}


def test_every_promise_holds_on_a_server_that_keeps_them(tracer: Path):
    with serving(FakeEngine(BOOK)) as server:
        found = inspect(server.url, tracer)
    assert [found.dialect, found.tracer, found.left, found.stopped] == ["caesura", "v1", [], None]
    assert evidence(found, "violated") == {}
    assert evidence(found, "not-checkable") == {}


def test_sglang_keeps_what_its_dialect_can_express(tracer: Path):
    with serving(FakeEngine(BOOK), "sglang") as server:
        found = inspect(server.url, tracer)
    assert [found.dialect, found.tracer, found.left] == ["sglang", "v1", []]
    assert evidence(found, "violated") == {}
    unseen = evidence(found, "not-checkable")
    assert {id for id, why in unseen.items() if "cannot wait" in why} >= {
        "pause-wait-clear",
        "wait-over-keep",
        "late-wait",
        "update-wait-clear",
    }
    assert "cannot be asked for update_weights over HTTP" in unseen["session-once"]


@pytest.mark.parametrize("kind", ["contract", "sglang"])
@pytest.mark.parametrize(
    ("fault", "caught_by", "says"),
    [
        ("stale-cache", "update-keep-clear", "read stale KV"),
        ("stale-cache", "update-abort-clear", "read stale KV"),
        ("stale-cache", "clear-clears", "were found in the cache"),
        ("dropped-token", "tokens-conserved", "lost (1 tokens"),
        ("dropped-token", "pause-keep-clear", "expected all of them"),
        ("doubled-token", "tokens-conserved", "doubled (1 tokens"),
        ("wrong-label", "labels-true", "reported v2, sampled by v1"),
        ("wrong-label", "label-spans", "expected [('default', 0,"),
        ("forgotten-label", "update-keep-clear", "the server reports 'default'"),
        ("lost-weights", "update-keep-no-clear", "sampled by [('v1', 0,"),
        ("deaf-pause", "pause-keep-clear", "more tokens after the pause was answered"),
        ("ignored-flag", "is-paused-follows", "[False, False, False]"),
        ("endless-abort", "abort-late", "though the abort was answered"),
    ],
)
def test_a_planted_fault_is_caught_over_plain_http(tracer: Path, kind: Kind, fault: str, caught_by: str, says: str):
    crossing = ("update-keep-clear", "update-keep-no-clear")  # what the last, over everything heard, has to judge by
    with serving(FakeEngine(BOOK, faults=frozenset({fault})), kind) as server:
        found = inspect(server.url, tracer, caught_by, *(crossing if caught_by in ("tokens-conserved", "labels-true") else ()))
    assert says in evidence(found, "violated")[caught_by]


def test_a_wait_that_is_answered_early_is_caught(tracer: Path):
    with serving(FakeEngine(BOOK, faults=frozenset({"silent-wait"}))) as server:
        found = inspect(server.url, None, "pause-wait-clear")
    assert "though the pause was answered" in evidence(found, "violated")["pause-wait-clear"]


def test_the_server_is_left_as_it_was_found(tracer: Path):
    engine = FakeEngine(BOOK, "v2")
    engine.label = "step-7"
    with serving(engine) as server:
        found = inspect(server.url, tracer, "update-keep-clear", "label-needs-pause", "session-holds-pause", "sleep-keeps-pause")
    assert found.left == []
    assert [engine.mode, engine.label, engine.version, engine.session, engine.sleeping, engine.live] == [
        None,
        "step-7",
        "v2",
        False,
        False,
        {},
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_check_that_is_stopped_leaves_nothing_paused(tracer: Path, tmp_path: Path, number: signal.Signals):
    engine = FakeEngine(BOOK)
    with serving(engine) as server:
        command = [sys.executable, "-m", "harness.cli", "check", server.url, "--tracer", str(tracer), "--runs", str(tmp_path / "runs")]
        child = subprocess.Popen(command, cwd=Path(__file__).parents[3], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while engine.mode is None and child.poll() is None:
            time.sleep(0.001)
        child.send_signal(number)
        _, errors = child.communicate(timeout=30)
    assert child.returncode == 130, errors
    assert [engine.mode, engine.label, engine.live] == [None, "default", {}]
    assert read_log(next((tmp_path / "runs").glob("*-check-*"))).closed


def check(*words: str, tmp_path: Path) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["check", *words, "--runs", str(tmp_path / "runs"), "--timeout", "5"])
    code = ended.value.code
    assert isinstance(code, int)
    return code


def test_the_exit_code_is_the_verdicts(tracer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with serving(FakeEngine(BOOK)) as server:
        assert check(server.url, "--only", "pause-keep-clear", tmp_path=tmp_path) == 0
        assert "1 promises hold" in capsys.readouterr().out
        assert check(server.url, "--only", "update-keep-clear", "--only", "pause-again", tmp_path=tmp_path) == 0
        required = ["--only", "update-keep-clear", "--only", "pause-again", "--require", "update-keep-clear"]
        assert check(server.url, *required, tmp_path=tmp_path) == 2
        assert "name the tracer's folder with --tracer" in capsys.readouterr().out
    with serving(FakeEngine(BOOK, faults=frozenset({"deaf-pause"}))) as server:
        assert check(server.url, "--only", "pause-keep-clear", "--json", tmp_path=tmp_path) == 1
    answer = json.loads(capsys.readouterr().out)
    assert [answer["status"], answer["rows"][0]["id"], answer["rows"][0]["verdict"]] == ["violated", "pause-keep-clear", "violated"]
    assert (Path(answer["folder"]) / "report.txt").read_text().startswith("VIOLATED")


def test_what_the_client_saw_is_a_log_that_is_judged_again(tracer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with serving(FakeEngine(BOOK)) as server:
        check(server.url, "--only", "pause-keep-clear", "--only", "pause-abort-clear", tmp_path=tmp_path)
    log = read_log(tmp_path / "runs" / "latest")
    assert [log.closed, log.opened.level, log.opened.backend] == [True, 0, "http"]
    kinds = {type(entry.event).__name__ for entry in log.entries}
    assert kinds == {"Opened", "Asked", "Heard", "Answered", "Closed"}


def test_bad_input_is_a_sentence(tracer: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def refused(*words: str) -> str:
        assert check(*words, tmp_path=tmp_path) == 64
        return capsys.readouterr().err

    engine = FakeEngine(BOOK)
    with serving(engine) as server:
        assert "there is no such check, did you mean `pause-keep-clear`?" in refused(server.url, "--require", "pause-keep-claer")
        assert "has no versions of a tracer" in refused(server.url, "--tracer", str(tmp_path))
        engine.mode = "keep"
        assert "is paused or asleep" in refused(server.url)
    with serving(engine, control_plane=False) as server:
        assert "has no control plane: /is_paused is 404; start it with --dev-mode" in refused(server.url)
    with serving(FakeEngine(BOOK), key="secret") as server:
        assert "wants a key" in refused(server.url)
        assert check(server.url, "--key", "secret", "--only", "pause-again", tmp_path=tmp_path) == 0
    with serving(FakeEngine(CodeBook(versions=2, shares=8, context=1024), "v2"), metrics=False) as server:
        assert "cannot be seen" in refused(server.url)
        assert "are none of the tracer in" in refused(server.url, "--foreign-traffic-ok", "--tracer", str(tracer))
    assert "cannot reach" in refused("http://127.0.0.1:9")
    assert "expected a URL like" in refused("localhost:8000")


def test_a_server_that_somebody_uses_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    engine = FakeEngine(BOOK)
    with serving(engine) as server:
        engine.submit("theirs", [1, 2, 3], 3000)
        assert check(server.url, tmp_path=tmp_path) == 64
        assert "has 1 requests that are not ours" in capsys.readouterr().err
        assert engine.mode is None and "theirs" in engine.live


def test_a_server_that_says_nothing_is_given_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(SystemExit) as ended:
        main(["check", f"http://127.0.0.1:{silent.getsockname()[1]}", "--runs", str(tmp_path), "--timeout", "0.2"])
    assert ended.value.code == 64
    assert "is there but slow: GET /v1/models: no answer within 0.2 s" in capsys.readouterr().err


def test_checks_have_names_and_statements():
    for id, made in CHECKS.items():
        assert id == made.id and made.promise and not made.promise.endswith(".")
