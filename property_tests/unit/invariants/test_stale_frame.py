"""stale-frame: what was in flight at a preemption, a reset or an end is delivered or dropped, once, and touches no later life."""

from __future__ import annotations

from typing import Self

import pytest

from harness.events import Accepted, Dropped, DropReason, Freed, Landed, Preempted, Sampled

from .logs import Timeline, said

ID = "stale-frame"


class Pipeline(Timeline):
    """A timeline whose steps land later than the next is launched."""

    def arrive(self, step: int, **tokens: int) -> Self:
        """Step `step` lands with these tokens, and they are delivered."""
        for id, token in tokens.items():
            self._sampled[id].append(token)
        self.add(Landed(step=step, sampled=tuple(Sampled(id, token) for id, token in tokens.items())))
        return self.deliver() if tokens else self

    def drop(self, step: int, id: str, why: DropReason) -> Self:
        return self.add(Dropped(step=step, request=id, why=why))

    def preempt(self, id: str, *head: int, by: str | None) -> Self:
        return self.add(Preempted(request=id, by=by), Freed(request=id, head=head, tail=()))


def in_flight() -> Pipeline:
    """r1 and r2 have one token each; step 2 of both is in flight."""
    log = Pipeline().submit("r1", [20, 21]).submit("r2", [30, 31]).admit("r1", [0]).admit("r2", [1])
    return log.launch(("r1", 0, 2), ("r2", 0, 2)).launch(("r1", 2, 1), ("r2", 2, 1)).arrive(1, r1=7, r2=8)


def pressed() -> Pipeline:
    """As above; then r2 gives way to r1, and step 3 is launched without it."""
    return in_flight().preempt("r2", 1, by="r1").launch(("r1", 3, 1))


def reset() -> Pipeline:
    """As above; but a reset preempts both while step 2 is in flight, and step 3 computes them anew."""
    log = in_flight().preempt("r2", 1, by=None).preempt("r1", 0, by=None).cleared()
    return log.admit("r1", [0], life=2).admit("r2", [1], life=2).launch(("r1", 0, 3), ("r2", 0, 3))


# What must hold.


def test_steady_overlap_holds():
    log = in_flight().launch(("r1", 3, 1), ("r2", 3, 1)).arrive(2, r1=9, r2=10).arrive(3, r1=11, r2=12)
    for id in (ID, "token-conservation"):
        assert log.holds(id)


def test_a_token_delivered_to_a_preempted_request_holds():
    log = pressed().arrive(2, r1=9, r2=10).launch(("r1", 4, 1)).arrive(3, r1=11).arrive(4, r1=12)
    log.admit("r2", [1], life=2).launch(("r2", 0, 4)).arrive(5, r2=13)
    for id in (ID, "token-conservation"):
        assert log.holds(id)


def test_tokens_dropped_by_a_reset_hold():
    log = reset().arrive(2).drop(2, "r1", "reset").drop(2, "r2", "reset").arrive(3, r1=9, r2=10)
    for id in (ID, "token-conservation"):
        assert log.holds(id)


def test_the_dropped_token_of_an_aborted_request_holds_also_if_its_id_is_used_again():
    log = in_flight().abort("r2", head={"r2": (1,)}).submit("r2", [40, 41]).admit("r2", [1]).launch(("r1", 3, 1), ("r2", 0, 2))
    log.arrive(2, r1=9).drop(2, "r2", "aborted").arrive(3, r1=11, r2=12)
    for id in (ID, "token-conservation"):
        assert log.holds(id)


# Known failures.


def test_k01_a_valid_token_after_resume_is_dropped():
    log = in_flight().pause("keep", clear_cache=True).arrive(2, r1=9, r2=10).preempt("r2", 1, by=None).preempt("r1", 0, by=None).cleared()
    log.effective("keep", clear_cache=True).resume().admit("r1", [0], life=2).launch(("r1", 0, 4)).arrive(3).drop(3, "r1", "reset")
    assert said(log.violation(ID)) == (
        "the token of step 3 for r1 was dropped, and neither an end nor a reset of r1 came since the launch",
        "the token is r1's output 2",
        "dropped (reset)",
    )
    assert said(log.violation("token-conservation")) == (
        "step 3 did not sample one token for each row that reached its request's last token",
        "tokens for [r1]",
        "tokens for []",
    )


def test_k01_the_output_after_resume_is_shifted_by_one():
    log = in_flight().pause("keep").arrive(2, r1=9, r2=10).effective("keep").resume()
    log.launch(("r1", 3, 1)).launch(("r1", 4, 1)).arrive(3).arrive(4, r1=12)
    assert (
        log.violation("token-conservation").sentence == "step 3 did not sample one token for each row that reached its request's last token"
    )


def test_k02_a_late_token_is_given_to_the_life_after_a_reset():
    log = reset().arrive(2, r1=9).drop(2, "r2", "reset")
    violation = log.violation(ID)
    assert said(violation) == (
        "step 2 gave r1 a token, although r1 was preempted by a cache reset since the launch",
        "`dropped` (reset): nothing is left of the life that the step belongs to",
        "9, when none is outstanding: r1 is running, in its life 2",
    )
    assert [cause.what for cause in violation.cause] == ["launched step 2", "r1 preempted by a cache reset"]


def test_k03_the_token_in_flight_of_a_preempted_request_is_lost():
    violation = pressed().arrive(2, r1=9).violation(ID)
    assert said(violation) == (
        "the token of step 2 for r2 was lost when r2 was preempted",
        "a token for r2: whoever is preempted under pressure keeps what is in flight",
        "tokens for [r1]",
    )
    assert [cause.what for cause in violation.cause] == ["launched step 2", "r2 preempted by another's need"]


def test_k03_dropping_it_is_losing_it_and_told_once():
    assert (
        pressed().arrive(2, r1=9).drop(2, "r2", "reset").violation(ID).sentence
        == "the token of step 2 for r2 was lost when r2 was preempted"
    )


# Each in its own way.


def test_nobody_is_admitted_again_before_his_token_arrived():
    log = in_flight().preempt("r2", 1, by="r1").admit("r2", [1], life=2)
    assert said(log.violation(ID)) == (
        "r2 was admitted again while step 2 still has a token for it",
        "step 2 landed before",
        "life 2 begins at 3 tokens, and one of them will be sampled twice",
    )


def test_a_finished_request_gets_no_token():
    log = in_flight().abort("r2", head={"r2": (1,)}).add(Landed(step=2, sampled=(Sampled("r1", 9), Sampled("r2", 10))))
    assert said(log.violation(ID)) == (
        "step 2 gave r2 a token, although r2 was aborted since the launch",
        "`dropped` (aborted): nothing is left of the life that the step belongs to",
        "10, for a request that is over",
    )


@pytest.mark.parametrize(
    "after",
    [
        pytest.param(lambda log: log.launch(("r1", 3, 1)), id="a launch"),
        pytest.param(lambda log: log.launch(("r1", 3, 1)).arrive(3, r1=11), id="a landing"),
        pytest.param(lambda log: log.pause("keep").effective("keep"), id="a pause"),
        pytest.param(lambda log: log.finish("r1", head=(0,)).close(), id="the end"),
    ],
)
def test_a_late_token_does_not_vanish(after):
    log = in_flight().abort("r2", head={"r2": (1,)}).arrive(2, r1=9)
    assert said(after(log).violation(ID)) == (
        "the token of step 2 for r2 vanished",
        "`dropped` (aborted) right after the landing, as r2 was aborted since the launch",
        "neither landed nor dropped",
    )


def test_a_drop_gives_its_true_reason():
    log = in_flight().abort("r2", head={"r2": (1,)}).arrive(2, r1=9).drop(2, "r2", "reset")
    assert said(log.violation(ID)) == (
        "the token of step 2 for r2 was dropped for a reason that is not so",
        "aborted: since the launch r2 was aborted",
        "reset",
    )


@pytest.mark.parametrize(
    "drop",
    [
        pytest.param((2, "r2", "aborted"), id="twice"),
        pytest.param((1, "r2", "aborted"), id="of another step"),
        pytest.param((2, "r9", "aborted"), id="of a request that the step does not compute"),
    ],
)
def test_what_no_step_owes_is_not_dropped(drop):
    log = in_flight().abort("r2", head={"r2": (1,)}).arrive(2, r1=9).drop(2, "r2", "aborted").drop(*drop)
    assert log.violation(ID).sentence == f"a token of step {drop[0]} for {drop[1]} was dropped, and none was left to drop"


def test_of_a_request_without_a_known_prompt_nobody_knows_which_row_samples():
    log = Pipeline().add(Accepted(request="r9", parked=False)).admit("r9", [0]).launch(("r9", 0, 4))
    log.preempt("r9", 0, by="r9").admit("r9", [0], life=2).arrive(1)
    assert log.holds(ID)


def test_an_interrupted_log_may_end_before_the_drop():
    assert in_flight().abort("r2", head={"r2": (1,)}).arrive(2, r1=9).close("interrupted").holds(ID)
