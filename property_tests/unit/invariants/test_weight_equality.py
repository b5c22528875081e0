"""weight-equality: what lies in memory after a commit is what was sent, where it was."""

from __future__ import annotations

import pytest

from harness.events import Committed, PartReceived, UpdateStarted
from harness.operations import SwapWeights

from .logs import NEW_WEIGHTS, Timeline, said

ID = "weight-equality"


def committed(**told) -> Timeline:
    log = Timeline().pause("keep").effective("keep").take_up(SwapWeights(source=NEW_WEIGHTS, version="v2"))
    log.add(UpdateStarted(), PartReceived(part=1, of=1, tensors=1, bytes=4), Committed(version="v2", **told))
    return log.answer({"status": "finished", "weight_version": "v2"})


def test_every_rank_holds_what_was_sent():
    assert committed(sent="5f3a", resident=("5f3a", "5f3a")).holds(ID)


def test_where_nobody_looked_nothing_is_said():
    judgement = committed().judgement(ID)
    assert judgement.status == "not-checkable"
    assert judgement.reason == "no commit tells checksums: nobody compared the weights with those that were sent"


def test_weights_that_are_not_those_that_were_sent():
    log = committed(sent="5f3a", resident=("5f3a", "00c1"), differing=("lm_head.weight",))
    assert said(log.violation(ID)) == (
        "the weights committed as v2 are not those that were sent, of [lm_head.weight]",
        "checksum 5f3a on every rank",
        "[00c1 on rank 1]",
    )
    assert [(cause.seq, cause.what) for cause in log.violation(ID).cause] == [(log.last(PartReceived), "first byte of epoch 1")]


@pytest.mark.parametrize("checksum", ["", "5f3a"])
def test_tensors_that_moved(checksum: str):
    log = committed(sent=checksum, resident=(checksum,) if checksum else (), moved=("model.norm.weight",))
    assert said(log.violation(ID)) == (
        "tensors moved in memory by the update to v2",
        "every tensor written in place, where graphs were captured",
        "[model.norm.weight] at other addresses",
    )


def test_weights_that_were_sent_once_do_not_answer_for_the_next_commit():
    log = committed(sent="5f3a", resident=("5f3a",)).take_up(SwapWeights(source=NEW_WEIGHTS, version="v3"))
    log.add(UpdateStarted(), PartReceived(part=1, of=1, tensors=1, bytes=4), Committed(version="v3", sent="77aa", resident=("5f3a",)))
    assert log.violation(ID).sentence == "the weights committed as v3 are not those that were sent"
