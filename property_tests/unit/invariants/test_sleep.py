"""What sleeping must not do: run, lose whose pause it is, lie about what sleeps. Over several invariants, as their ids say."""

from __future__ import annotations

from harness.events import Asleep, Awake, Freed, PauseEffective, Preempted, Resumed, UpdateStarted
from harness.operations import IsSleeping, Resume, Sleep, StartWeightUpdate, WakeUp

from .logs import Timeline, said

STEP, QUIET, MODE, API = "no-step-while-paused", "quiet-after-pause", "mode-fidelity", "api-truth"
COMMIT, TWICE, FLAGS = "atomic-commit", "idempotent-control", "flags-converge"


def running(**options: int) -> Timeline:
    return Timeline(**options).submit("r1", [20, 21]).admit("r1", [0]).step(("r1", 0, 2), r1=7)


def preempted(log: Timeline) -> Timeline:
    return log.add(Preempted(request="r1", by=None), Freed(request="r1", head=(0,), tail=())).cleared()


def asleep(level: int = 1) -> Timeline:
    """A running engine put to sleep, its request kept."""
    log = running().sleep(level, "keep")
    return (preempted(log) if level else log).falls_asleep(level)


def again(log: Timeline) -> Timeline:
    """r1 runs again from its first token."""
    return log.admit("r1", [0], life=2).step(("r1", 0, 3), r1=8)


def test_a_sleep_and_its_wake_up_hold_everything():
    for log in (asleep().wake_up(left=("kv_cache",), tags=("weights",)).wake_up(resumed=True), asleep().wake_up(resumed=True)):
        assert all(again(log).holds(id) for id in (STEP, QUIET, MODE, API, COMMIT, TWICE, FLAGS))


# no-step-while-paused


def test_nothing_runs_while_the_cache_sleeps():
    log = again(asleep().wake_up(left=("kv_cache",), tags=("weights",)))
    assert said(log.violation(STEP)) == ("step 2 was launched while kv_cache sleeps", "no forward before all is awake", "a step of [r1]")
    assert [cause.what for cause in log.violation(STEP).cause] == ["fell asleep", "last wake-up"]


def test_a_partial_wake_up_does_not_resume():
    violation = asleep().wake_up(left=("kv_cache",), tags=("weights",), resumed=True).violation(STEP)
    assert said(violation) == (
        "the engine resumed while kv_cache sleeps",
        "resume refused, and no wake-up's resume, until all is awake",
        "`resumed`",
    )


def test_a_resume_is_refused_at_level_0_too():
    log = asleep(0).take_up(Resume()).add(Resumed()).answer()
    assert log.violation(STEP).sentence == "the engine resumed while scheduling sleeps"


def test_memory_is_not_given_back_under_a_step_in_flight():
    log = running().launch(("r1", 2, 1)).sleep(0, "keep").falls_asleep(0)
    assert said(log.violation(STEP)) == (
        "the engine fell asleep at level 0 under a step in flight",
        "memory given back once a pause is effective and every launched step has landed",
        "steps [2] in flight",
    )


def test_memory_is_not_given_back_before_the_pause_is_effective():
    log = running().sleep(1, "wait").add(Asleep(level=1, tags=("kv_cache", "weights")))
    assert log.violation(STEP).got == "an engine that may run"


def test_level_2_leaves_nothing_to_run_on():
    log = again(asleep(2).wake_up(resumed=True))
    assert said(log.violation(STEP)) == (
        "step 2 was launched while out of service",
        "no forward before a full update succeeds",
        "a step of [r1]",
    )
    assert [cause.what for cause in log.violation(STEP).cause] == ["woke without weights: sleep at level 2 dropped them"]


def test_after_level_2_an_update_brings_the_engine_back():
    log = asleep(2).wake_up(left=("kv_cache",), tags=("weights",)).swap("v2").wake_up(resumed=True)
    assert again(log).holds(STEP)


# quiet-after-pause


def test_a_sleep_returns_after_its_pause():
    log = running().sleep(1, "keep").answer({"status": "sleeping"})
    assert log.violation(QUIET).sentence == "sleep call 2 returned although no pause has taken effect since"


def test_a_sleep_that_never_returns():
    assert running().sleep(0, "keep").close("paused").violation(QUIET).sentence == "sleep call 2 never returned"


# mode-fidelity


def test_a_sleep_without_a_mode_aborts_nobody_that_a_pause_keeps():
    log = running().pause("keep").effective("keep").sleep(0).finish("r1", "abort", head=(0,))
    assert said(log.violation(MODE)) == (
        "r1 was aborted under sleep(keep), and nobody asked for that",
        "an end by a client's abort or a pause(abort) after the request came",
        "finish reason abort",
    )


def test_a_sleep_without_a_mode_aborts_nobody_parked_since_an_abort():
    log = Timeline().pause("abort").effective("abort").submit("r1", [20], parked=True).sleep(0, acting="abort").finish("r1", "abort")
    assert log.violation(MODE).sentence == "r1 was aborted under sleep(abort), and nobody asked for that"


def test_a_sleep_by_abort_leaves_none_alive():
    violation = running().sleep(0, "abort").falls_asleep(0, "abort").violation(MODE)
    assert violation.sentence == "sleep(abort) returned with requests alive"


def test_a_pause_that_was_asked_for_survives_the_wake_up():
    log = running().pause("keep").effective("keep").sleep(0).falls_asleep(0)
    assert said(log.wake_up(resumed=True).violation(MODE)) == (
        "a keep pause that was asked for ended without a resume",
        "paused until somebody resumes: sleep and its wake-up end only what sleep alone has paused",
        "`resumed`",
    )


def test_a_sleep_that_gives_memory_back_clears_the_cache():
    violation = running().sleep(1, "keep").falls_asleep(1).violation(MODE)
    assert violation.sentence == "a pause with clear_cache=True took effect and the cache had not been emptied"


def test_level_0_keeps_the_cache():
    violation = preempted(running().sleep(0, "keep")).violation(MODE)
    assert violation.sentence == "r1 was preempted by a cache reset under sleep(keep), and no call asked for that"


# api-truth


def test_a_sleep_succeeds_once_asleep():
    log = running().sleep(0, "keep").add(PauseEffective(mode="keep", clear_cache=False)).answer({"status": "sleeping"})
    assert said(log.violation(API)) == ("sleep (call 2) succeeded without its effect", "`asleep` before the answer", "none")


def test_sleep_is_as_deep_as_was_asked_for():
    log = running().sleep(2, "keep").add(PauseEffective(mode="keep", clear_cache=True), Asleep(level=1, tags=("kv_cache", "weights")))
    assert said(log.violation(API)) == (
        "the engine does not sleep as its calls asked for",
        "level 2, [kv_cache, weights] asleep",
        "level 1, [kv_cache, weights] asleep",
    )


def test_sleeping_again_gives_back_what_woke():
    log = asleep().wake_up(left=("kv_cache",), tags=("weights",)).sleep(1)
    log.add(PauseEffective(mode="keep", clear_cache=True), Asleep(level=1, tags=("kv_cache",)))
    assert log.violation(API).got == "level 1, [kv_cache] asleep"


def test_a_wake_up_succeeds_once_awake():
    log = asleep().take_up(WakeUp()).add(Awake(tags=("weights",))).answer({"status": "awake"})
    assert said(log.violation(API)) == ("wake_up (call 3) succeeded and did not wake what it names", "all awake", "[weights] asleep")


def test_a_wake_up_ends_the_pause_that_sleep_made():
    assert said(asleep().wake_up().violation(API)) == (
        "wake_up (call 3) left the engine in the pause that sleep alone had made",
        "`resumed` before the answer",
        "paused",
    )


def test_a_wake_up_without_weights_leaves_the_pause():
    assert asleep(2).wake_up().holds(API)


def test_a_refused_sleep_does_nothing():
    log = running().sleep(0, "keep").refuse("conflict")
    assert log.violation(API).sentence == "sleep (call 2) was refused (conflict), and did something"


# atomic-commit


def test_no_session_is_opened_over_sleeping_weights():
    log = asleep().take_up(StartWeightUpdate()).add(UpdateStarted()).answer()
    assert said(log.violation(COMMIT)) == (
        "a weight session was opened while the weights sleep",
        "the call refused until they are awake",
        "[kv_cache, weights] asleep",
    )


def test_a_session_may_be_opened_while_only_the_cache_sleeps():
    assert asleep().wake_up(left=("kv_cache",), tags=("weights",)).swap("v2").holds(COMMIT)


# idempotent-control


def test_an_awake_engine_does_not_wake():
    log = running().take_up(WakeUp()).add(Awake(tags=())).answer({"status": "awake"})
    assert log.violation(TWICE).sentence == "an engine that was awake woke up"


def test_a_sleep_at_level_0_of_a_paused_engine_ends_nobody():
    log = running().pause("keep").effective("keep").sleep(0).finish("r1", "abort", head=(0,))
    assert log.violation(TWICE).sentence == "a pause by keep of a paused engine ended r1"


# flags-converge


def test_is_sleeping_says_what_is():
    assert asleep().take_up(IsSleeping()).answer({"is_sleeping": True}).holds(FLAGS)
    log = asleep().wake_up(resumed=True).take_up(IsSleeping()).answer({"is_sleeping": True})
    assert said(log.violation(FLAGS)) == ("is_sleeping answered True while the engine is awake", "False", "True")


def test_a_sleep_of_an_unknown_level_is_no_operation():
    """What this version cannot read is not held against the engine."""
    log = running().take_up(Sleep(level=0, mode="keep"))
    log.entries[-2].event.operation["sleep"] = {"level": 7}
    log.add(Asleep(level=7, tags=())).answer()
    assert log.holds(API)
