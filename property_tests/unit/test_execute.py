"""When timeline entries fire, and how a run ends."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from harness.backends.sim import SimBackend
from harness.events import Called, Closed, Entry, Launched, Returned
from harness.execute import Lockstep
from harness.operations import from_data, in_words
from harness.scenario import Scenario, load_scenario
from harness.trial import opened_event

HEAD = "schema: 1\nname: test\nengine: {block_size: 4, num_blocks: 16, max_model_len: 64, max_num_batched_tokens: 8}\ntimeline:\n"
SUBMIT = "  - submit: {id: r1, prompt: {tokens: 6, seed: 1}, max_tokens: 8}\n"


def scenario(folder: Path, timeline: str) -> Scenario:
    file = folder / "scenario.yaml"
    file.write_text(HEAD + timeline)
    return load_scenario(file)


def run(folder: Path, timeline: str, backend: SimBackend | None = None) -> list[Entry]:
    backend = backend or SimBackend()
    what = scenario(folder, timeline)
    info = backend.start(what.engine)
    entries: list[Entry] = []
    Lockstep(what, backend, [entries.extend]).run(opened_event(what.engine, backend, info, digest=what.digest, seed=0))
    return entries


def told(entries: list[Entry]) -> list[str]:
    """Calls and steps in order, with virtual milliseconds."""
    lines = []
    for _, t_ns, _, event in entries:
        if isinstance(event, Called):
            lines.append(f"{t_ns / 1e6:g} {in_words(from_data(event.operation)).split(' max_tokens')[0]}")
        elif isinstance(event, Launched):
            lines.append(f"{t_ns / 1e6:g} step")
    return lines


def closed(entries: list[Entry]) -> Closed:
    event = entries[-1].event
    assert isinstance(event, Closed)
    return event


def test_an_entry_without_trigger_is_called_right_after_the_one_above(tmp_path: Path) -> None:
    entries = run(tmp_path, SUBMIT + "  - is_paused:\n  - {when: {step: 2}, is_paused: {}}\n  - abort: {ids: all}\n")
    assert told(entries) == ["0 submit r1", "0 is_paused", "1 step", "2 step", "2 is_paused", "2 abort ids=all"]


def test_triggers_of_one_boundary_fire_in_file_order_and_once(tmp_path: Path) -> None:
    timeline = SUBMIT + "  - {when: {request: r1, tokens: 1}, is_paused: {}}\n  - {when: {step: 1}, abort: {ids: [r1]}}\n"
    assert told(run(tmp_path, timeline)) == ["0 submit r1", "1 step", "1 is_paused", "1 abort ids=r1"]


def test_step_suspends_its_own_chain_only(tmp_path: Path) -> None:
    timeline = SUBMIT + "  - step:\n  - abort: {ids: [r1]}\n  - {when: {ms: 0.5}, is_paused: {}}\n"
    assert told(run(tmp_path, timeline)) == ["0 submit r1", "1 step", "1 abort ids=r1", "1 is_paused"]


def test_advance_by_time_jumps_where_there_is_no_work(tmp_path: Path) -> None:
    assert told(run(tmp_path, "  - advance: {ms: 7}\n  - is_paused:\n")) == ["7 is_paused"]


def test_advance_by_steps_ends_when_there_is_no_work_left(tmp_path: Path) -> None:
    timeline = "  - submit: {id: r1, prompt: {tokens: 3}, max_tokens: 2}\n  - advance: {steps: 50}\n  - is_paused:\n"
    assert told(run(tmp_path, timeline)) == ["0 submit r1", "1 step", "2 step", "2 is_paused"]


def test_calls_do_not_block_a_pause_may_be_pending_while_later_entries_fire(tmp_path: Path) -> None:
    pause = "  - {when: {step: 2}, pause: {mode: wait}, as: p1}\n"
    later = "  - {when: {step: 3}, is_paused: {}}\n  - {when: {returned: p1, ms: 5}, resume: {}}\n"
    lines = told(run(tmp_path, SUBMIT + pause + later))
    assert lines.index("3 is_paused") < lines.index("8 step") < lines.index("13 resume")


def test_entries_that_never_fire_are_named_with_their_line(tmp_path: Path) -> None:
    entries = run(tmp_path, SUBMIT + "  - {when: {request: r1, state: preempted}, step: {}}\n  - is_paused:\n")
    assert closed(entries).unfired == ("line 6: step", "line 7: is_paused")


@pytest.mark.parametrize(
    ("timeline", "why"),
    [
        (SUBMIT, "drained"),
        (SUBMIT + "  - {when: {step: 1}, pause: {mode: keep}}\n", "paused"),
        (SUBMIT + "  - {when: {step: 1}, pause: {mode: abort}}\n", "drained"),
        (
            SUBMIT + "  - {when: {step: 1}, pause: {mode: keep}}\n  - swap_weights: {source: {original: true}, fails: true}\n",
            "out-of-service",
        ),
    ],
    ids=["drained", "paused", "paused without a live request", "out of service"],
)
def test_the_log_says_why_the_run_ended(tmp_path: Path, timeline: str, why: str) -> None:
    assert closed(run(tmp_path, timeline)).why == why


def test_an_engine_that_has_work_and_does_none_is_given_up_as_stalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Busy(SimBackend):
        def step(self):
            return [Launched(step=1, batch=())]

    monkeypatch.setattr("harness.execute.STALLED_STEPS", 20)
    entries = run(tmp_path, SUBMIT, Busy())
    assert closed(entries).why == "stalled"
    assert sum(isinstance(entry.event, Launched) for entry in entries) == 20


def test_ctrl_c_ends_the_run_after_the_transaction_that_it_falls_into(tmp_path: Path) -> None:
    class Interrupted(SimBackend):
        def step(self):
            signal.raise_signal(signal.SIGINT)
            return super().step()

    entries = run(tmp_path, SUBMIT, Interrupted())
    assert closed(entries).why == "interrupted"
    assert sum(isinstance(entry.event, Launched) for entry in entries) == 1


def test_a_second_ctrl_c_interrupts_at_once(tmp_path: Path) -> None:
    class Hangs(SimBackend):
        def step(self):
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("not reached")

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, SUBMIT, Hangs())


def test_an_engine_that_raises_ends_the_run_as_crashed_with_what_it_raised(tmp_path: Path) -> None:
    class Crashes(SimBackend):
        def apply(self, op, operation):
            raise IndexError("no such block")

    end = closed(run(tmp_path, SUBMIT, Crashes()))
    assert end.why == "crashed"
    assert end.error.startswith("in call #0, submit r1 max_tokens=8: IndexError: no such block (test_execute.py:")


def test_a_text_prompt_is_tokenised_once_and_logged_with_its_tokens(tmp_path: Path) -> None:
    entries = run(tmp_path, "  - submit: {id: r1, prompt: {text: abc}, max_tokens: 1}\n")
    called = next(entry.event for entry in entries if isinstance(entry.event, Called))
    assert called.operation["submit"]["prompt"] == {"text": "abc", "tokens": [97, 98, 99]}
    returned = next(entry.event for entry in entries if isinstance(entry.event, Returned))
    assert returned.answer == {"state": "queued"}
