"""The log as files: nothing appended is lost, nothing is invented, and what is wrong is named by file and line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from harness.events import (
    SCHEMA,
    Accepted,
    Closed,
    Delivered,
    Entry,
    Event,
    Landed,
    Launched,
    Opened,
    Output,
    Relabelled,
    Resumed,
    Sampled,
    Scheduled,
)
from harness.log import LogError, LogWriter, TornTail, iter_file, read_log

ROOT = Path(__file__).parents[2]
OPENED = Opened(
    schema=SCHEMA,
    caesura="0.1.0",
    backend="sim",
    versions={"model": "1"},
    level=2,
    device="cpu",
    engine={"block_size": 16},
    profile="caesura",
    eos_token_ids=(0, 2),
    scenario="",
    seed=0,
    clock_base_ns=0,
    rank=0,
)
RESUMED = Resumed()


def step(number: int, position: int, token: int) -> list[Event]:
    return [
        Launched(step=number, batch=(Scheduled("r1", position, 1),)),
        Landed(step=number, sampled=(Sampled("r1", token),)),
        Delivered(outputs=(Output("r1", number - 1, (token,), None),)),
    ]


RUN: list[tuple[int, list[Event]]] = [
    (0, [OPENED]),
    (1, [Accepted(request="r1", parked=False)]),
    *((n, step(n, n + 3, 10 + n)) for n in range(2, 5)),
    (5, [Relabelled(version="größe")]),
    (5, [Closed(why="drained", count=12)]),
]


def write(folder: Path, transactions: Sequence[tuple[int, Sequence[Event]]], writer: str = "r0") -> Path:
    with LogWriter(folder, writer) as log:
        for t_ns, events in transactions:
            log.append(t_ns, events)
    return log.path


def write_lines(folder: Path, *lines: str) -> Path:
    """A file with the opening line and `lines`."""
    opened = msgspec.json.encode((0, 0, (OPENED,))).decode()
    path = folder / "events.r0.jsonl"
    path.write_text("".join(f"{line}\n" for line in (opened, *lines)), encoding="utf-8")
    return path


def entries(transactions: Sequence[tuple[int, Sequence[Event]]], writer: str = "r0") -> list[Entry]:
    """What reading `transactions` back must give."""
    events = [(t_ns, event) for t_ns, together in transactions for event in together]
    return [Entry(seq, t_ns, writer, event) for seq, (t_ns, event) in enumerate(events)]


def exhaust(reading: Generator[Entry, None, TornTail | None]) -> tuple[list[Entry], TornTail | None]:
    """All entries of a file and what was left out at its end."""
    read = []
    while True:
        try:
            read.append(next(reading))
        except StopIteration as stop:
            return read, stop.value


def test_a_log_reads_back_as_it_was_written(tmp_path: Path):
    path = write(tmp_path / "made" / "run", RUN)
    assert path.name == "events.r0.jsonl"
    for log in (read_log(path), read_log(path.parent)):
        assert log.entries == entries(RUN)
        assert (log.opened, log.closed, log.torn, log.tails) == (OPENED, True, None, ())


def test_append_answers_with_the_number_of_the_first_event(tmp_path: Path):
    with LogWriter(tmp_path) as log:
        assert [log.append(t_ns, events) for t_ns, events in RUN] == [0, 1, 2, 5, 8, 11, 12]
        assert log.seq == 13


def test_no_events_are_no_line(tmp_path: Path):
    with LogWriter(tmp_path) as log:
        log.append(0, [OPENED])
        assert (log.append(1, []), log.append(1, [RESUMED])) == (1, 1)
    assert len(log.path.read_bytes().splitlines()) == 2


def test_a_log_that_was_not_closed_says_so(tmp_path: Path):
    assert not read_log(write(tmp_path, RUN[:-1])).closed


def test_a_cut_at_any_byte_leaves_whole_lines_and_reports_the_rest(tmp_path: Path):
    whole = write(tmp_path, RUN).read_bytes()
    ends = [at + 1 for at, byte in enumerate(whole) if byte == ord("\n")]
    path = tmp_path / "events.cut.jsonl"
    for cut in range(1, len(whole) + 1):
        path.write_bytes(whole[:cut])
        lines = sum(end <= cut for end in ends)
        start = ends[lines - 1] if lines else 0
        read, torn = exhaust(iter_file(path))
        assert read == entries(RUN[:lines], "cut")
        assert torn == (TornTail(path, start, whole[start:cut]) if start < cut else None)
        if lines:
            assert read_log(path).torn == torn
        else:
            with pytest.raises(LogError, match=r"events\.cut\.jsonl:1: expected a line with `opened`, got half a line"):
                read_log(path)


def test_a_torn_tail_of_one_file_does_not_hide_the_other(tmp_path: Path):
    write(tmp_path, RUN, "client")
    torn = write(tmp_path, RUN, "r0")
    torn.write_bytes(torn.read_bytes()[:-1])
    log = read_log(tmp_path)
    assert [entry.writer for entry in log.entries].count("client") == 13
    assert (log.closed, log.torn) == (False, TornTail(torn, log.tails[0].offset, b'[12,5,[["closed","drained",12,[],""]]]'))


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_kill_9_loses_nothing_that_was_appended(tmp_path: Path):
    program = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from harness.events import Accepted, Opened
from harness.log import LogWriter
log = LogWriter(Path({str(tmp_path)!r}))
log.append(0, [Opened(**{msgspec.structs.asdict(OPENED)!r})])
while True:
    print(log.append(log.seq, [Accepted(request="r1", parked=False)] * 50), flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        told = [process.stdout.readline() for _ in range(20)]
        process.send_signal(signal.SIGKILL)
        told += process.stdout.read().splitlines(keepends=True)
    appended = 50 + max(int(line) for line in told if line.endswith(b"\n"))
    log = read_log(tmp_path)
    assert process.returncode == -signal.SIGKILL
    assert len(log.entries) in (appended, appended + 50)  # the last append may have returned without having been told
    assert [entry.seq for entry in log.entries] == list(range(len(log.entries)))


def test_a_full_disk_is_an_error_and_tears_only_the_end(tmp_path: Path):
    resource = pytest.importorskip("resource")
    program = f"""
import resource, sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from harness.events import Accepted, Opened
from harness.log import LogError, LogWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
log = LogWriter(Path({str(tmp_path)!r}))
log.append(0, [Opened(**{msgspec.structs.asdict(OPENED)!r})])
for attempt in range(100):
    try:
        log.append(0, [Accepted(request="r1", parked=False)])
    except LogError as error:
        print(error)
"""
    assert resource.RLIMIT_FSIZE is not None
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.splitlines()
    assert "bytes could be written: is the disk full?" in told[0]
    assert told[1:] == [f"{tmp_path}/events.r0.jsonl: the writer is closed"] * len(told[1:]) != []
    log = read_log(tmp_path)
    assert log.torn is not None and log.torn.offset + len(log.torn.dropped) == 1000
    assert len(log.entries) == 101 - len(told)


def test_a_log_is_never_overwritten(tmp_path: Path):
    path = write(tmp_path, RUN)
    before = path.read_bytes()
    with pytest.raises(LogError, match=r"events\.r0\.jsonl exists and a log is never overwritten"):
        LogWriter(tmp_path)
    assert path.read_bytes() == before


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LogError, match=r"cannot write a log to .*file"):
        LogWriter(tmp_path / "file")


@pytest.mark.parametrize("writer", ["", "../r0", "r0.r1"])
def test_a_writer_needs_a_plain_name(tmp_path: Path, writer: str):
    with pytest.raises(LogError, match="expected a writer's name of letters"):
        LogWriter(tmp_path, writer)


@pytest.mark.parametrize(
    ("transactions", "message"),
    [
        ([(0, [RESUMED])], "expected `opened` as the first event, got `resumed`"),
        ([(0, [OPENED]), (1, [OPENED])], "expected `opened` once"),
        ([*RUN, (6, [RESUMED])], "expected nothing after `closed`, got `resumed`"),
        ([(0, [OPENED]), (1, [Closed(why="drained", count=7)])], "expected `closed` to count the 1 events before it, got 7"),
        ([(5, [OPENED]), (4, [RESUMED])], "expected a time of 5 ns or later, got 4"),
        ([(0, [OPENED]), (1, [Relabelled(version="\ud800")])], "surrogates not allowed"),
    ],
)
def test_the_writer_refuses_what_the_reader_would_and_is_closed_then(tmp_path: Path, transactions: list, message: str):
    log = LogWriter(tmp_path)
    for t_ns, events in transactions[:-1]:
        log.append(t_ns, events)
    with pytest.raises(LogError, match=rf"events\.r0\.jsonl: cannot append event \d+: .*{message}"):
        log.append(*transactions[-1])
    with pytest.raises(LogError, match="the writer is closed"):
        log.append(9, [RESUMED])
    if transactions[:-1]:
        assert read_log(tmp_path).entries == entries(transactions[:-1])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["[1,0,[[", '[1,0,[["resumed"]]]'], r":2: expected \[seq, t_ns, \[event, ...\]\], got .*truncated"),
        ([""], ":2: expected .seq, t_ns"),
        (['[1,0,[["exploded"]]]'], r":2: expected \[seq, t_ns, \[event, ...\]\], got .*exploded"),
        (['[1,0,[["accepted","r1","no"]]]'], ":2: expected .seq, .*Expected `bool`, got `str`"),
        (["[1,0,[]]"], ":2: expected at least one event"),
        (
            ['[1,0,[["resumed"]]]', '[4,0,[["resumed"]]]'],
            ":3: expected a line that begins with event 2, got one that begins with 4: 2 events are",
        ),
        (
            ['[1,0,[["resumed"]]]', '[1,0,[["resumed"]]]'],
            ":3: expected a line that begins with event 2, got one that begins with 1: it repeats",
        ),
        (['[1,5,[["resumed"]]]', '[2,4,[["resumed"]]]'], ":3: expected a time of 5 ns or later, got 4"),
        (['[1,0,[["stepped",[7]]]]'], ":2: expected 0 tokens, .*, got 1"),
        (['[1,0,[["closed","drained",1]]]', '[2,0,[["resumed"]]]'], ":3: expected nothing after `closed`"),
        (['[1,0,[["closed","drained",1],["resumed"]]]'], ":2: expected nothing after `closed`, got `resumed`"),
        (['[1,0,[["closed","drained",9]]]'], ":2: expected `closed` to count the 1 events"),
    ],
)
def test_what_is_wrong_in_the_middle_is_named_by_file_and_line(tmp_path: Path, lines: list[str], message: str):
    path = write_lines(tmp_path, *lines)
    with pytest.raises(LogError, match=rf"^{path}{message}"):
        read_log(tmp_path)


def test_half_a_line_after_closed_is_no_torn_tail(tmp_path: Path):
    path = write(tmp_path, RUN)
    path.write_bytes(path.read_bytes() + b"[13,")
    with pytest.raises(LogError, match=":8: expected nothing after `closed`, got 4 bytes"):
        read_log(path)


def test_a_newer_schema_is_refused_before_its_events_are_read(tmp_path: Path):
    path = tmp_path / "events.r0.jsonl"
    path.write_text(f'[0,0,[["opened",{SCHEMA + 1},{{"of":"another"}},"shape"],["unheard-of"]]]\n')
    with pytest.raises(LogError, match=rf":1: the log has schema {SCHEMA + 1}, this Caesura reads up to {SCHEMA}: upgrade"):
        read_log(path)


@pytest.mark.parametrize(
    "text", ["[]\n", '{"opened": 1}\n', "\x00\x01\n", '[0,0,[["opened","1"]]]\n', "step,token\n1,2\n", '[0,0,[["opened",0]]]\n']
)
def test_a_foreign_file_is_refused(tmp_path: Path, text: str):
    (tmp_path / "events.r0.jsonl").write_text(text)
    with pytest.raises(LogError, match=r"events\.r0\.jsonl:1: (not a Caesura log: expected .0, t_ns|expected a schema of 1)"):
        read_log(tmp_path)


def test_nothing_to_read_is_an_error(tmp_path: Path):
    with pytest.raises(LogError, match=r"no log in .*: expected files named events\.<writer>\.jsonl"):
        read_log(tmp_path)
    with pytest.raises(LogError, match=r"cannot read .*missing: No such file"):
        read_log(tmp_path / "missing")
    (tmp_path / "events.r0.jsonl").touch()
    with pytest.raises(LogError, match=r"events\.r0\.jsonl:1: expected a line with `opened`, got an empty file"):
        read_log(tmp_path)


def test_writers_merge_by_time_then_name_and_each_keeps_its_order(tmp_path: Path):
    client = [(0, [OPENED]), (2, [Relabelled(version="a"), Relabelled(version="b")]), (4, [Closed(why="done", count=3)])]
    rank = [
        (1, [msgspec.structs.replace(OPENED, rank=1)]),
        (2, [Relabelled(version="c")]),
        (3, [RESUMED]),
        (5, [Closed(why="done", count=3)]),
    ]
    write(tmp_path, rank, "r1")
    write(tmp_path, client, "client")
    log = read_log(tmp_path)
    order = ["client", "r1", "client", "client", "r1", "r1", "client", "r1"]
    assert [(entry.seq, entry.writer) for entry in log.entries] == list(enumerate(order))
    assert [entry.event.version for entry in log.entries if isinstance(entry.event, Relabelled)] == ["a", "b", "c"]
    assert (log.opened, log.closed) == (OPENED, True)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 6), max_size=8).map(sorted), min_size=2, max_size=3))
def test_merging_keeps_every_entry_and_each_writers_order(tmp_path_factory: pytest.TempPathFactory, times: list[list[int]]):
    folder = tmp_path_factory.mktemp("merge")
    runs = {f"r{n}": [(0, [OPENED]), *((t_ns, [RESUMED, RESUMED]) for t_ns in writer)] for n, writer in enumerate(times)}
    for writer, run in runs.items():
        write(folder, run, writer)
    merged = read_log(folder).entries
    assert [entry.seq for entry in merged] == list(range(len(merged)))
    assert [(entry.t_ns, entry.writer) for entry in merged] == sorted((entry.t_ns, entry.writer) for entry in merged)
    for writer, run in runs.items():
        of_one = [entry._replace(seq=place) for place, entry in enumerate(entry for entry in merged if entry.writer == writer)]
        assert of_one == entries(run, writer)


EXAMPLES = [part.split("```")[0] for part in (ROOT / "docs/log.md").read_text(encoding="utf-8").split("```jsonl\n")[1:]]


@pytest.mark.parametrize("example", EXAMPLES, ids=["lockstep", "client"])
def test_an_example_in_the_documentation_is_what_the_writer_writes(example: str, tmp_path: Path):
    path = tmp_path / "events.r0.jsonl"
    path.write_text(example, encoding="utf-8")
    read = read_log(path).entries
    starts = [msgspec.json.decode(line)[0] for line in example.splitlines()]
    lines = [read[start:end] for start, end in zip(starts, [*starts[1:], len(read)], strict=True)]
    again = write(tmp_path / "again", [(line[0].t_ns, [entry.event for entry in line]) for line in lines])
    assert again.read_text(encoding="utf-8") == example


def test_the_published_schema_describes_a_line():
    schema = Draft202012Validator(json.loads((ROOT / "docs/events.schema.json").read_text(encoding="utf-8")))
    for line in "".join(EXAMPLES).splitlines():
        schema.validate(json.loads(line))
    assert not schema.is_valid([1, 0, [["exploded"]]])


def test_logs_of_different_clock_bases_merge_on_one_clock(tmp_path: Path) -> None:
    for writer, base_ns in (("client", 1_000), ("r0", 400)):
        with LogWriter(tmp_path, writer) as log:
            log.append(0, [msgspec.structs.replace(OPENED, clock_base_ns=base_ns, level=0 if writer == "client" else 2)])
            log.append(500, [Resumed()])
    log = read_log(tmp_path)
    assert [(entry.writer, entry.t_ns) for entry in log.entries] == [("r0", 0), ("r0", 500), ("client", 600), ("client", 1_100)]
    assert log.opened.level == 2, "the writer that shows most says what the log shows"
