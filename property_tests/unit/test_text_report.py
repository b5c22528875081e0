"""A report fits a screen and says what to do next."""

from __future__ import annotations

from pathlib import Path

from harness.backends.sim import SimBackend
from harness.events import Entry, Opened
from harness.execute import Lockstep
from harness.log import Log
from harness.scenario import load_scenario
from harness.trial import Trial, opened_event, review
from reports.text import Origin, render
from reports.words import timeline_row

ROOT = Path(__file__).parents[2]
ORIGIN = Origin(Path("runs/one"), "caesura run one.yaml --engine sim")


def trial_of(name: str, *, spoil) -> Trial:
    """A run of a scenario on the model whose log is spoiled before it is judged."""
    scenario = load_scenario(ROOT / "scenarios/modes" / name)
    backend, entries = SimBackend(), []
    info = backend.start(scenario.engine)
    Lockstep(scenario, backend, [entries.extend]).run(opened_event(scenario.engine, backend, info, digest=scenario.digest, seed=0))
    opened = entries[0].event
    assert isinstance(opened, Opened)
    return review(Log(entries=spoil(entries), opened=opened, closed=True, tails=()), scenario)


def without(kind: str):
    """Take the first event of a kind out of a log."""

    def spoil(entries: list[Entry]) -> list[Entry]:
        place = next(index for index, entry in enumerate(entries) if entry.event.__struct_config__.tag == kind)
        rest = entries[:place] + entries[place + 1 :]
        return [entry._replace(seq=index) for index, entry in enumerate(rest)]

    return spoil


def test_a_violation_states_event_expected_got_cause_and_timeline_in_under_25_lines():
    trial = trial_of("keep_clear_two_requests.yaml", spoil=without("cleared"))
    text = render(trial, None, ORIGIN)
    lines = text.splitlines()
    begin = next(index for index, line in enumerate(lines) if line.startswith("violated"))
    end = next(index for index in range(begin, len(lines)) if lines[index].split()[:1] == ["again"])
    block = lines[begin : end + 1]
    assert len(block) < 25
    for word in ("event", "expected", "got", "again"):
        assert any(line.split()[:1] == [word] for line in block), word
    assert sum(line.lstrip().startswith(">") for line in block) == 1
    assert sum(" ms  " in line for line in block) <= 10


def test_no_line_is_longer_than_a_screen():
    for name in ("preemption_small_pool.yaml", "keep_clear_two_requests.yaml"):
        report = render(trial_of(name, spoil=lambda entries: entries), None, ORIGIN)
        assert max(len(line) for line in report.splitlines()[1:]) <= 118


def test_the_text_of_a_request_is_split_at_its_weight_boundary():
    report = render(trial_of("keep_clear_two_requests.yaml", spoil=lambda entries: entries), None, ORIGIN)
    assert "  default [0:4] " in report
    assert "  v2 [4:12] " in report


def test_every_kind_of_event_has_words():
    entries = trial_of("failed_update_out_of_service.yaml", spoil=lambda entries: entries).entries
    rows = [timeline_row(entry) for entry in entries]
    assert all(len(row.split()) >= 4 for row in rows)
