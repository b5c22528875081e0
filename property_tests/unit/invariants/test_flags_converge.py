"""flags-converge: is_paused says what is."""

from __future__ import annotations

from harness.operations import IsPaused

from .logs import Timeline, said

ID = "flags-converge"


def asked(log: Timeline, answer: bool) -> Timeline:
    return log.take_up(IsPaused()).answer({"is_paused": answer})


def test_the_flag_follows_pause_and_resume():
    log = asked(Timeline(), False).pause("wait")
    assert asked(asked(asked(log, True).effective("wait", ops=[2]), True).resume(), False).holds(ID)


def test_the_flag_rises_when_the_pause_is_taken_up():
    violation = asked(Timeline().pause("wait"), False).violation(ID)
    assert said(violation) == ("is_paused answered False while the engine is paused", "True", "False")
    assert [cause.what for cause in violation.cause] == ["last pause taken up, pending"]


def test_the_flag_falls_with_the_resume():
    violation = asked(Timeline().pause("keep").effective("keep").resume(), True).violation(ID)
    assert said(violation) == ("is_paused answered True while the engine is running", "False", "True")


def test_an_answer_may_be_overtaken():
    assert Timeline().take_up(IsPaused()).pause("keep").answer({"is_paused": False}, op=1).holds(ID)
