"""What users see when something is wrong with what they gave: one sentence, exit code 64, nothing half-written."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from harness.cli import main

ROOT = Path(__file__).parents[2]
HOLDS = str(ROOT / "scenarios/modes/keep_clear_two_requests.yaml")
HEAD = "schema: 1\nname: test\n"


@pytest.fixture
def caesura(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """Runs the command line in an empty folder: (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit:
            main(list(arguments))
        captured = capsys.readouterr()
        return exit.value.code if isinstance(exit.value.code, int) else 0, captured.out, captured.err

    return call


def write(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


def test_a_run_that_holds_leaves_events_scenario_and_report(caesura) -> None:
    code, out, _ = caesura("run", HOLDS, "--engine", "sim")
    assert code == 0
    assert "HOLDS" in out
    latest = Path("runs/latest")
    assert sorted(file.name for file in latest.iterdir()) == ["coverage.txt", "events.r0.jsonl", "report.txt", "scenario.yaml"]
    assert (latest / "report.txt").read_text() == out
    assert (latest / "scenario.yaml").read_text() == Path(HOLDS).read_text()


def test_replay_judges_a_log_again_and_shows_the_state_at_an_event(caesura) -> None:
    caesura("run", HOLDS, "--engine", "sim")
    code, out, _ = caesura("replay", "runs/latest")
    assert code == 0
    assert "sim explains sim" in out
    code, out, _ = caesura("replay", "runs/latest", "--until", "40", "--state")
    assert code == 0
    assert "state after event 40" in out
    assert "paused (keep)" in out


def test_a_quick_replay_says_of_the_invariants_what_a_whole_one_says(caesura) -> None:
    caesura("run", HOLDS, "--engine", "sim")
    _, whole, _ = caesura("replay", "runs/latest", "--json")
    code, quick, _ = caesura("replay", "runs/latest", "--quick", "--json")
    assert code == 0 and json.loads(quick)["judgements"] == json.loads(whole)["judgements"]
    code, text, _ = caesura("replay", "runs/latest", "--quick")
    assert code == 0 and "HOLDS" in text
    log = Path("runs/latest/events.r0.jsonl")
    log.write_bytes(log.read_bytes()[:-10])
    code, text, _ = caesura("replay", str(log), "--quick")
    assert code == 2 and "UNKNOWN" in text


def test_json_says_the_same_for_machines(caesura) -> None:
    code, out, _ = caesura("run", HOLDS, "--engine", "sim", "--json")
    answer = json.loads(out)
    assert (code, answer["status"]) == (0, "holds")
    assert {judgement["status"] for judgement in answer["judgements"]} <= {"holds", "not-checkable"}


def test_report_writes_the_report_again(caesura) -> None:
    caesura("run", HOLDS, "--engine", "sim")
    report = Path("runs/latest/report.txt")
    report.unlink()
    code, out, _ = caesura("report", "runs/latest")
    assert code == 0
    assert report.read_text() == out


def test_two_logs_are_compared_event_by_event(caesura) -> None:
    caesura("run", HOLDS, "--engine", "sim", "--runs", "a")
    caesura("run", HOLDS, "--engine", "sim", "--runs", "b")
    caesura("run", HOLDS, "--engine", "sim", "--runs", "c", "--seed", "7")
    assert caesura("diff", "a/latest", "b/latest")[0] == 0
    code, out, _ = caesura("diff", "a/latest", "c/latest")
    assert code == 1
    assert "the logs part at event" in out


def test_set_overrides_the_engine_and_is_kept_with_the_run(caesura) -> None:
    code, _, _ = caesura("run", HOLDS, "--engine", "sim", "--set", "engine.num_blocks=9")
    assert code == 0
    assert "num_blocks: 9" in Path("runs/latest/scenario.yaml").read_text()


def test_an_entry_that_never_fires_makes_the_verdict_unknown_by_name(caesura) -> None:
    timeline = "timeline:\n  - submit: {id: r1, prompt: {tokens: 3}}\n  - {when: {request: r1, state: preempted}, resume: {}}\n"
    code, out, _ = caesura("run", write("s.yaml", HEAD + timeline))
    assert code == 2
    assert "never fired, line 5: resume" in out


def test_a_request_that_can_never_fit_is_refused_with_numbers(caesura) -> None:
    timeline = "engine: {block_size: 4, num_blocks: 4}\ntimeline:\n  - submit: {id: r1, prompt: {tokens: 30}, max_tokens: 4}\n"
    code, out, _ = caesura("run", write("s.yaml", HEAD + timeline))
    assert code == 2
    assert "refused        #0 submit r1 max_tokens=4: invalid" in out
    assert "no step was made" in out


def test_every_cut_of_a_good_log_replays_without_a_violation(caesura) -> None:
    caesura("run", HOLDS, "--engine", "sim")
    for until in range(0, 93):
        code, out, _ = caesura("replay", "runs/latest", "--until", str(until))
        assert code == 0, (until, out)


def test_what_a_whole_state_showed_is_not_forgotten_when_the_log_is_judged_again(caesura, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    from engine.core import EngineCore

    with monkeypatch.context() as patch:
        patch.setattr(EngineCore, "update_open", property(lambda self: False))
        code, out, _ = caesura("diff", str(ROOT / "scenarios/modes/weights_in_parts.yaml"), "--engines", "sim,torch")
        assert code == 1, out
    code, out, _ = caesura("report", "runs/latest")
    assert code == 1
    assert "the visible state differs in update_open" in out


def test_an_engine_that_raises_is_a_violation_and_its_log_is_closed(caesura, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.model.engine import EngineModel

    def broken(self, sample):
        raise AssertionError("two blocks, one owner")

    with monkeypatch.context() as patch:
        patch.setattr(EngineModel, "land", broken)
        code, out, _ = caesura("run", HOLDS, HOLDS, "--engine", "sim")
    assert code == 1
    assert out.count("the engine crashed in step 1: AssertionError: two blocks, one owner") == 2
    assert "crashed" in Path("runs/latest/events.r0.jsonl").read_text().splitlines()[-1]


def test_ctrl_c_leaves_a_closed_log_a_report_and_exit_code_130(caesura, monkeypatch: pytest.MonkeyPatch) -> None:
    from harness.backends.sim import SimBackend

    right = SimBackend.step

    def step(self):
        signal.raise_signal(signal.SIGINT)
        return right(self)

    monkeypatch.setattr(SimBackend, "step", step)
    code, out, _ = caesura("run", HOLDS, "--engine", "sim")
    assert code == 130
    assert "the run was interrupted" in out
    assert "interrupted" in Path("runs/latest/events.r0.jsonl").read_text().splitlines()[-1]
    assert Path("runs/latest/report.txt").read_text() == out


BAD = [
    pytest.param(["run", "missing.yaml"], "missing.yaml", id="no such scenario"),
    pytest.param(["run", "unknown.yaml"], "unknown.yaml:3: timelin", id="unknown field"),
    pytest.param(["run", "aborts.yaml"], "aborts.yaml:4: timeline[0].abort.ids[0]", id="abort of an id that is never submitted"),
    pytest.param(["run", "never.yaml"], "never.yaml:5: timeline[1].when", id="a trigger that can never fire"),
    pytest.param(["run", "longer.yaml"], "expected at most 4, all that r1 can generate", id="more tokens than max_model_len leaves"),
    pytest.param(["run", "blocked.yaml"], "got blocked under late_requests queue", id="a state that this policy does not have"),
    pytest.param(["run", "nocall.yaml"], "`step`, which is no call", id="a name for what is no call"),
    pytest.param(["run", "itself.yaml"], "which this very entry submits", id="a submit that waits for itself"),
    pytest.param(["run", "nopool.yaml"], "num_blocks", id="a pool of no blocks"),
    pytest.param(["run", HOLDS, "--engine", "nemo"], "unknown engine 'nemo'", id="unknown engine"),
    pytest.param(["run", HOLDS, "--engine", "torch", "--set", "engine.checkpoint=nowhere"], "nowhere", id="no such checkpoint"),
    pytest.param(["run", HOLDS, "--engine", "torch", "--set", "engine.checkpoint=encoder"], "encoder", id="not a causal language model"),
    pytest.param(["run", "vocabulary.yaml", "--engine", "torch"], "vocabulary.yaml:4: r1 has token 99999", id="a token that is none"),
    pytest.param(["diff", "source.yaml", "--engines", "sim,torch"], "nowhere", id="weights from a checkpoint that is not there"),
    pytest.param(["run", HOLDS, "--set", "engine.colour=red"], "engine.NAME=VALUE", id="unknown setting"),
    pytest.param(["run", HOLDS, "--set", "engine.num_blocks=["], "no YAML value", id="a setting that is no YAML"),
    pytest.param(["run", "violates.yaml"], "did you mean `cache-epoch`", id="an invariant that does not exist"),
    pytest.param(["diff", HOLDS, "--engines", "sim,sim"], "one is sim", id="the model against itself"),
    pytest.param(["run", HOLDS, "--set", "engine.num_blocks=0"], "num_blocks", id="a setting of no blocks"),
    pytest.param(["run", HOLDS, "--runs", "afile/runs"], "cannot make a run folder", id="unwritable run folder"),
    pytest.param(["run", HOLDS, "--nonsense"], "--nonsense", id="unknown option"),
    pytest.param(["diff", HOLDS, "--engines", "torch"], "one is sim", id="one engine only"),
    pytest.param(["diff", HOLDS], "two logs", id="one log only"),
    pytest.param(["replay", "nowhere"], "nowhere", id="no log"),
    pytest.param(["replay", "foreign.jsonl"], "foreign.jsonl:1", id="a foreign log"),
    pytest.param(["replay", "empty.jsonl"], "empty file", id="an empty log"),
    pytest.param(["replay", "empty.jsonl", "--quick"], "empty file", id="an empty log, quick"),
    pytest.param(["replay", "empty.jsonl", "--quick", "--state"], "--quick keeps no events", id="quick with a state"),
    pytest.param(["report", "aborts.yaml"], "no run folder", id="not a run folder"),
    pytest.param(["checkpoint", "tiny", "encoder"], "encoder exists already", id="a checkpoint that is there"),
    pytest.param(["checkpoint", "llama", "out"], "tiny, smollm2 or tracer", id="unknown checkpoint"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD)
def test_bad_input_is_one_sentence_and_exit_code_64(caesura, arguments: list[str], said: str) -> None:
    write("unknown.yaml", HEAD + "timelin: []\n")
    write("aborts.yaml", HEAD + "timeline:\n  - abort: {ids: [r9]}\n")
    write(
        "never.yaml",
        HEAD + "timeline:\n  - submit: {id: r1, prompt: {tokens: 3}, max_tokens: 2}\n  - {when: {request: r1, tokens: 3}, resume: {}}\n",
    )
    submit = "  - submit: {id: r1, prompt: {tokens: 4}, max_tokens: 9}\n"
    small = HEAD + "engine: {max_model_len: 8}\ntimeline:\n" + submit
    write("longer.yaml", small + "  - {when: {request: r1, tokens: 5}, resume: {}}\n")
    write("blocked.yaml", small + "  - {when: {request: r1, state: blocked}, resume: {}}\n")
    write("nocall.yaml", small + "  - {step: {}, as: s1}\n")
    write("itself.yaml", HEAD + "timeline:\n  - {when: {request: r1, tokens: 1}, submit: {id: r1, prompt: {tokens: 4}}}\n")
    write("nopool.yaml", HEAD + "engine: {num_blocks: 0}\ntimeline: []\n")
    write("vocabulary.yaml", HEAD + "timeline:\n  - submit: {id: r1, prompt: {tokens: [1, 99999]}}\n")
    write("source.yaml", HEAD + "timeline:\n" + submit + "  - swap_weights: {source: {checkpoint: nowhere}}\n")
    write("foreign.jsonl", '{"level":"info"}\n')
    write("empty.jsonl", "")
    write("violates.yaml", HEAD + "timeline: []\nexpect: {violates: [cache-epok]}\n")
    write("afile", "")
    Path("encoder").mkdir()
    write("encoder/config.json", '{"architectures": ["BertModel"], "model_type": "bert"}')
    write("encoder/model.safetensors", "")
    code, out, err = caesura(*arguments)
    assert code == 64, (out, err)
    assert said in err
    assert "Traceback" not in err
    assert not Path("runs").exists()
    assert not Path("out").exists()


def test_a_truncated_log_is_judged_up_to_where_it_ends_and_the_rest_is_reported(caesura) -> None:
    caesura("run", HOLDS, "--engine", "sim")
    log = Path("runs/latest/events.r0.jsonl")
    log.write_bytes(log.read_bytes()[:-400])
    code, out, err = caesura("replay", "runs/latest")
    assert code == 2
    assert "are half a line and were left out" in out + err
    assert "the log is not closed" in out
