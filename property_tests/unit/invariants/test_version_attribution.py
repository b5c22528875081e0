"""version-attribution: labels tell which weights sampled."""

from __future__ import annotations

from harness.events import Committed, Landed, Launched, PartReceived, Relabelled, Sampled, Scheduled, UpdateFailed, UpdateStarted
from harness.operations import StartWeightUpdate, SwapWeights, UpdateWeightVersion

from .logs import NEW_WEIGHTS, Timeline, said

ID = "version-attribution"


def crossed() -> Timeline:
    """r1 got a token from each of two versions."""
    log = Timeline().submit("r1", [20, 21]).admit("r1", [0]).step(("r1", 0, 2), r1=7)
    return log.pause("keep").effective("keep").swap("v2").resume().step(("r1", 2, 1), r1=8)


def test_spans_of_the_resident_versions_hold():
    assert crossed().finish("r1", spans=[("default", 0, 1), ("v2", 1, 2)], head=(0,)).deliver(r1="length").holds(ID)


def test_no_output_has_no_spans():
    assert Timeline().submit("r1", [20]).abort("r1").holds(ID)


def test_neighbours_of_one_label_may_be_joined_or_not():
    log = Timeline().submit("r1", [20, 21]).admit("r1", [0]).step(("r1", 0, 2), r1=7).step(("r1", 2, 1), r1=8)
    assert log.finish("r1", spans=[("default", 0, 1), ("default", 1, 2)], head=(0,)).holds(ID)


def test_a_label_may_return():
    log = crossed().pause("keep").effective("keep").add(Relabelled(version="default")).resume().step(("r1", 3, 1), r1=9)
    assert log.finish("r1", spans=[("default", 0, 1), ("v2", 1, 2), ("default", 2, 3)], head=(0,)).holds(ID)


def test_one_label_for_tokens_of_two_versions():
    violation = crossed().finish("r1", spans=[("v2", 0, 2)], head=(0,)).violation(ID)
    assert said(violation) == (
        "r1's token 0 is labelled with weights that did not sample it",
        "[default [0, 1), v2 [1, 2)]",
        "[v2 [0, 2)]",
    )


def test_spans_that_end_early():
    violation = crossed().finish("r1", spans=[("default", 0, 1)], head=(0,)).violation(ID)
    assert said(violation) == (
        "r1's version spans do not partition its output: they end at 1 of 2 tokens",
        "[default [0, 1), v2 [1, 2)]",
        "[default [0, 1)]",
    )


def test_spans_with_a_gap():
    violation = crossed().finish("r1", spans=[("default", 0, 0), ("v2", 1, 2)], head=(0,)).violation(ID)
    assert violation.sentence == "r1's version spans do not partition its output: [0, 0) of default follows token 0"


def test_spans_that_overlap():
    violation = crossed().finish("r1", spans=[("default", 0, 2), ("v2", 1, 2)], head=(0,)).violation(ID)
    assert violation.sentence == "r1's version spans do not partition its output: [1, 2) of v2 follows token 2"


def test_no_token_out_of_service():
    log = crossed().take_up(SwapWeights(source=NEW_WEIGHTS, fails=True))
    log.add(UpdateStarted(), UpdateFailed(phase="update", wrote=True, why="broke")).refuse("failed")
    failed = log.last(UpdateFailed)
    violation = log.step(("r1", 3, 1), r1=9).step(("r1", 4, 1), r1=9).violation(ID)
    assert said(violation) == (
        "step 3 sampled from weights that were never committed",
        "no token before a commit",
        "tokens of epoch 2 for [r1]",
    )
    assert (violation.cause[0].seq, violation.cause[0].what) == (failed, "first byte of epoch 2")


def test_no_token_in_the_middle_of_a_session():
    log = crossed().take_up(StartWeightUpdate()).add(UpdateStarted()).answer()
    log.add(PartReceived(part=1, of=2, tensors=1, bytes=4)).step(("r1", 3, 1), r1=9)
    assert log.violation(ID).sentence == "step 3 sampled from weights that were never committed"


def test_a_session_that_wrote_nothing_leaves_the_weights_committed():
    log = crossed().take_up(StartWeightUpdate()).add(UpdateStarted()).answer().step(("r1", 3, 1), r1=9)
    assert log.holds(ID)


def test_a_session_that_was_allowed_beside_steps():
    log = crossed().take_up(StartWeightUpdate(allow_unpaused=True)).add(UpdateStarted()).answer()
    log.add(PartReceived(part=1, of=1, tensors=1, bytes=4)).step(("r1", 3, 1), r1=9).add(Committed(version="v3"))
    log.step(("r1", 4, 1), r1=10)
    assert log.finish("r1", spans=[("default", 0, 1), ("v2", 1, 3), ("v3", 3, 4)], head=(0,)).holds(ID)


def test_a_partial_prefill_out_of_service_samples_nothing():
    log = Timeline().submit("r1", range(20, 26)).admit("r1", [0, 1])
    log.add(UpdateStarted(), UpdateFailed(phase="update", wrote=True, why="broke"))
    assert log.step(("r1", 0, 4)).holds(ID)


def test_the_epoch_never_falls_within_a_request():
    log = Timeline().submit("r1", [20, 21]).admit("r1", [0]).launch(("r1", 0, 2)).swap("v2")
    log.add(Launched(step=2, batch=(Scheduled("r1", 2, 1),)), Landed(step=2, sampled=(Sampled("r1", 8),)))
    log.add(Landed(step=1, sampled=(Sampled("r1", 7),)))
    assert said(log.violation(ID)) == ("the epoch of r1's tokens falls", "epoch 1 or later", "epoch 0, from step 1")


def relabelled(log: Timeline, version: str, *, allow_unpaused: bool = False) -> Timeline:
    return log.take_up(UpdateWeightVersion(version="v3", allow_unpaused=allow_unpaused)).add(Relabelled(version=version)).answer()


def test_a_label_is_set_under_a_pause_or_where_it_was_allowed_without():
    assert relabelled(crossed().pause("keep").effective("keep"), "v3").holds(ID)
    assert relabelled(crossed(), "v3", allow_unpaused=True).holds(ID)


def test_a_label_is_set_as_it_was_asked_for():
    violation = relabelled(crossed().pause("keep").effective("keep"), "v4").violation(ID)
    assert said(violation) == ("the version was set to another label than was asked for", "v3", "v4")


def test_no_label_is_set_while_running():
    assert said(relabelled(crossed(), "v3").violation(ID)) == (
        "the version was set to v3 without an effective pause",
        "the call refused, as allow_unpaused was not asked for",
        "a running engine",
    )


def test_no_label_is_set_under_a_pause_that_is_pending():
    violation = relabelled(crossed().pause("wait"), "v3").violation(ID)
    assert violation.got == "a wait pause that is pending"
    assert [cause.what for cause in violation.cause] == ["pause taken up"]
