"""The judge: one pass, whole or piece by piece, and what it says of logs that show too little."""

from __future__ import annotations

import pytest

from harness.events import Delivered, Output, Reference, Sampled
from harness.invariants import INVARIANTS, REPORTED, Invariant, Judge, invariant, judge
from harness.invariants.judge import UNFINISHED, UNOPENED

from .logs import Timeline


def good() -> Timeline:
    log = Timeline().submit("r1", [20, 21], max_tokens=2).admit("r1", [0]).step(("r1", 0, 2), r1=7)
    log.pause("keep").effective("keep").swap("v2", checksum="5f3a").resume().launch(("r1", 2, 1)).land(r1=8)
    log.finish("r1", spans=[("default", 0, 1), ("v2", 1, 2)], head=(0,)).deliver(r1="length")
    return log.add(Reference(request="r1", nth=1, kind="mixed", first=0, tokens=(7, 8))).close()


def test_a_good_log_holds_everything():
    assert {judgement.invariant: (judgement.status, judgement.reason) for judgement in judge(good().entries)} == dict.fromkeys(
        INVARIANTS, ("holds", "")
    )


def test_judging_piece_by_piece_is_judging_the_whole():
    log = good()
    log.add(Delivered(outputs=(Output("r1", 2, (9,), None),)))
    step_by_step = Judge()
    found = [violation for entry in log.entries for violation in step_by_step.feed([entry])]
    judgements = step_by_step.finish()
    assert judgements == judge(log.entries)
    assert found == [violation for judgement in judgements for violation in judgement.violations]
    assert [violation.sentence for violation in found] == ["r1 was delivered more after its finish reason"]


def test_a_client_log_shows_too_little():
    reasons = {judgement.reason for judgement in judge(Timeline(level=0).close().entries) if judgement.status == "not-checkable"}
    assert reasons == {
        "needs a log of level 1 (schedule), got level 0 (client)",
        "needs a log of level 2 (blocks), got level 0 (client)",
    }


def test_a_schedule_log_says_nothing_of_blocks():
    judgements = judge(Timeline(level=1).close().entries)
    assert sorted(judgement.invariant for judgement in judgements if judgement.status == "not-checkable") == [
        "block-lifetime",
        "cache-epoch",
        "golden",
        "reset-truth",
        "weight-equality",
    ]
    assert {judgement.status for judgement in judgements} == {"holds", "not-checkable"}


def test_a_log_without_the_shape_of_the_pool_says_nothing_of_blocks():
    log = Timeline()
    log.entries[0].event.engine.clear()
    assert log.judgement("block-lifetime").reason == "needs num_blocks and block_size of the engine in `opened`"


def test_a_log_that_was_not_opened_is_not_checkable():
    assert {(judgement.status, judgement.reason) for judgement in judge(good().entries[1:])} == {("not-checkable", UNOPENED)}


def test_a_log_without_an_end_is_judged_as_far_as_it_goes():
    log = Timeline().submit("r1", [20])
    judgement = log.judgement("one-ending")
    assert (judgement.status, judgement.reason) == ("holds", UNFINISHED)


def test_violations_are_told_up_to_a_limit_and_then_counted():
    log = Timeline()
    for number in range(REPORTED + 3):
        log.add(Delivered(outputs=(Output(f"r{number}", 0, (7,), None),)))
    judgement = log.judgement("token-conservation")
    assert (len(judgement.violations), judgement.more) == (REPORTED, 3)
    assert judgement.reason == f"{REPORTED + 3} violations, the first at event 1"


def test_a_violation_in_other_words_is_told_however_many_came_before():
    log = Timeline().submit("r0", [20])
    for number in range(REPORTED + 1):
        log.add(Delivered(outputs=(Output(f"r{number + 1}", 0, (7,), None),)))
    log.add(Delivered(outputs=(Output("r0", 3, (7,), None),)))
    judgement = log.judgement("token-conservation")
    assert (len(judgement.violations), judgement.more) == (REPORTED + 1, 1)
    assert len({violation.wording for violation in judgement.violations}) == 2


def test_invariants_can_be_chosen():
    assert [judgement.invariant for judgement in judge(good().entries, ["one-ending"])] == ["one-ending"]


def test_every_invariant_states_its_promise_in_one_line():
    assert [kind.statement() for kind in INVARIANTS.values() if "\n" in kind.statement() or not kind.statement().endswith(".")] == []


def test_a_method_named_after_no_event_is_refused():
    class Watcher(Invariant):
        """Watches."""

        def after_lunched(self, seq: int, event: Sampled) -> None: ...

    with pytest.raises(TypeError, match=r"Watcher\.after_lunched: there is no event `lunched`; expected one of opened,"):
        invariant("watcher", level=0)(Watcher)


def test_an_id_is_given_once():
    with pytest.raises(ValueError, match="two invariants are called one-ending: OneEnding and Invariant"):
        invariant("one-ending", level=0)(Invariant)
