"""What clients see of the promises, on their logs alone: good ones hold, and each bad one differs from a good one in one place."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Self

import pytest

from harness.events import SCHEMA, Answered, Asked, Closed, Entry, ErrorCode, Event, Failure, FinishReason, Heard, Opened, Output
from harness.invariants import CLIENT_INVARIANTS, INVARIANTS
from harness.invariants.panel import Panel
from harness.verdict import Judgement

from .sim_live import SimLive, run_live

OPENED = Opened(
    schema=SCHEMA,
    caesura="0.1.0",
    backend="http",
    versions={},
    level=0,
    device="unknown",
    engine={"max_model_len": 64},
    profile="caesura",
    eos_token_ids=(),
    scenario="",
    seed=0,
    clock_base_ns=0,
    rank=0,
)


class ClientLog:
    """A client's log under construction; every method appends and returns the log."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self._calls: dict[str, int] = {}
        self._heard: dict[str, int] = {}
        self._write(OPENED)

    def _write(self, event: Event) -> Self:
        self.entries.append(Entry(len(self.entries), len(self.entries), "client", event))
        return self

    def ask(self, verb: str, name: str = "", **arguments: Any) -> Self:
        """Make a call, which is answered under its name, or else its verb."""
        number = sum(isinstance(entry.event, Asked) for entry in self.entries)
        self._calls[name or verb] = number
        return self._write(Asked(call=number, operation={verb: arguments}))

    def submit(self, id: str = "r1", max_tokens: int = 8, **more: Any) -> Self:
        self._heard[id] = 0
        return self.ask("submit", id, id=id, prompt={"tokens": [17, 18, 19]}, max_tokens=max_tokens, **more)

    def hear(self, *tokens: int, id: str = "r1", first: int | None = None, ends: FinishReason | None = None) -> Self:
        first = self._heard[id] if first is None else first
        self._heard[id] = first + len(tokens)
        return self._write(Heard(outputs=(Output(id, first, tokens, ends),)))

    def answer(self, name: str, **content: Any) -> Self:
        return self._write(Answered(call=self._calls[name], answer=content, error=None))

    def refuse(self, name: str, code: ErrorCode) -> Self:
        return self._write(Answered(call=self._calls[name], answer=None, error=Failure(code, "no")))

    def end(self, id: str = "r1", reason: FinishReason = "length", **more: Any) -> Self:
        content = {"finish_reason": reason, "prompt_tokens": 3, "output_tokens": self._heard[id], **more}
        return self.answer(id, **content)

    def call(self, verb: str, **arguments: Any) -> Self:
        """Make a call that succeeds at once."""
        return self.ask(verb, **arguments).answer(verb, status="fine")

    def close(self, why: str = "drained") -> Self:
        return self._write(Closed(why=why, count=len(self.entries)))

    def judgement(self, id: str) -> Judgement:
        return next(judgement for judgement in Panel(self.entries).finish() if judgement.invariant == id)

    def sentence(self, id: str) -> str:
        (violation,) = self.judgement(id).violations
        return violation.sentence


def swap(log: ClientLog, version: str) -> ClientLog:
    return log.call("swap_weights", source={"original": True}, version=version)


def good() -> ClientLog:
    log = ClientLog().submit().hear(5).hear(6, 7).call("pause", mode="keep")
    log = swap(log, "v2").ask("is_paused").answer("is_paused", is_paused=True).call("resume").ask("is_paused", "again")
    log = log.answer("again", is_paused=False).hear(8, 9, 10, 11, 12, ends="length")
    return log.end(weight_versions=[["default", 0, 3], ["v2", 3, 8]]).close()


def test_what_clients_see_is_of_promises_that_engines_make_too() -> None:
    assert CLIENT_INVARIANTS.keys() <= INVARIANTS.keys()


def test_a_good_log_holds_and_what_only_ranks_show_is_not_checkable() -> None:
    judgements = Panel(good().entries).finish()
    assert {judgement.invariant for judgement in judgements if judgement.status == "holds"} == set(CLIENT_INVARIANTS)
    assert {judgement.status for judgement in judgements if judgement.invariant not in CLIENT_INVARIANTS} == {"not-checkable"}


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        (ClientLog().submit().hear(5).hear(7, first=2), "r1 lost 1 tokens on the way to its client"),
        (ClientLog().submit().hear(5, 6).hear(6, first=1), "r1 had token 1 heard twice"),
        (ClientLog().submit().hear(5, ends="stop").hear(6), "r1 was heard of again after its end"),
        (ClientLog().submit().hear(5, ends="stop").end("r1", "stop").hear(6), "outputs of r1 were heard, and no such request is open"),
        (
            ClientLog().submit().hear(5, ends="stop").answer("r1", finish_reason="stop", output_tokens=2),
            "r1 came back with another number of tokens than were heard",
        ),
    ],
    ids=["lost", "doubled", "after its end", "after its answer", "counted otherwise"],
)
def test_tokens_are_heard_from_the_first_to_the_last_each_once(log: ClientLog, sentence: str) -> None:
    assert log.sentence("token-conservation") == sentence


def test_outputs_of_two_requests_of_one_id_are_not_mixed_up() -> None:
    log = ClientLog().submit().hear(5, ends="stop").end("r1", "stop").submit().hear(5, ends="stop").end("r1", "stop").close()
    assert log.judgement("token-conservation").status == "holds"


def test_an_id_used_twice_is_refused_and_the_first_goes_on() -> None:
    log = ClientLog().submit().hear(5).ask("submit", "twice", id="r1", prompt={"tokens": [17]}).refuse("twice", "invalid")
    assert log.hear(6, ends="stop").end("r1", "stop").close().judgement("token-conservation").status == "holds"


@pytest.mark.parametrize("call", ["pause", "sleep"])
def test_no_token_is_heard_after_a_pause_was_answered(call: str) -> None:
    log = ClientLog().submit().hear(5).call(call, mode="keep").hear(6)
    assert log.sentence("quiet-after-pause") == "tokens of [r1] were heard although a pause had been answered"


@pytest.mark.parametrize("release", [("resume", {}), ("wake_up", {}), ("pause", {"mode": "wait"}), ("sleep", {"mode": "wait"})])
def test_a_call_that_may_start_scheduling_may_be_heard_of_before_its_answer(release: tuple[str, dict[str, Any]]) -> None:
    verb, arguments = release
    log = ClientLog().submit().hear(5).call("pause", mode="keep").ask(verb, **arguments).hear(6)
    assert log.judgement("quiet-after-pause").status == "holds"


def test_a_refused_resume_leaves_the_pause_in_force() -> None:
    log = ClientLog().submit().hear(5).call("pause", mode="keep").ask("resume").refuse("resume", "conflict").hear(6)
    assert log.judgement("quiet-after-pause").status == "violated"


def test_a_resume_on_its_way_leaves_it_open_whether_the_engine_is_paused() -> None:
    log = ClientLog().submit().ask("pause", mode="keep").ask("resume").answer("pause").hear(6)
    assert log.judgement("quiet-after-pause").status == "holds"


def test_an_end_without_tokens_may_be_heard_while_paused() -> None:
    log = ClientLog().submit().hear(5).call("pause", mode="keep").ask("abort", ids=["r1"]).hear(ends="abort").end("r1", "abort")
    assert log.answer("abort", aborted=1).judgement("quiet-after-pause").status == "holds"


def test_a_pause_is_answered_before_the_run_ends() -> None:
    assert ClientLog().ask("pause", mode="keep").close("stalled").sentence("quiet-after-pause") == "pause (call 0) was never answered"


@pytest.mark.parametrize(("mode", "what"), [("abort", "alive"), ("wait", "unfinished")])
def test_a_pause_that_is_answered_has_ended_whom_its_mode_ends(mode: str, what: str) -> None:
    log = ClientLog().submit().hear(5).call("pause", mode=mode)
    assert log.sentence("mode-fidelity") == f"pause({mode}) was answered with requests {what}"


def test_whoever_was_not_heard_of_may_have_come_after_the_pause() -> None:
    assert ClientLog().submit().call("pause", mode="abort").close("paused").judgement("mode-fidelity").status == "holds"


def test_nobody_is_aborted_unasked() -> None:
    log = ClientLog().submit().hear(5).call("pause", mode="keep").hear(ends="abort")
    assert log.sentence("mode-fidelity") == "r1 was aborted, and nobody asked for that"


@pytest.mark.parametrize("cause", [("abort", {"ids": ["r1"]}), ("abort", {"ids": "all"}), ("pause", {}), ("sleep", {})])
def test_a_call_that_aborts_explains_an_abort(cause: tuple[str, dict[str, Any]]) -> None:
    verb, arguments = cause
    log = ClientLog().submit().hear(5).ask(verb, **arguments).hear(ends="abort")
    assert log.judgement("mode-fidelity").status == "holds"


def test_a_call_that_was_answered_before_the_request_came_explains_nothing() -> None:
    assert ClientLog().call("abort", ids="all").submit().hear(ends="abort").judgement("mode-fidelity").status == "violated"


def test_each_submission_comes_back() -> None:
    assert ClientLog().submit().hear(5).close("stalled").sentence("one-ending") == "r1 was handed in and never came back"
    assert ClientLog().submit().hear(5).close("paused").judgement("one-ending").status == "holds"


def test_a_submission_comes_back_with_the_end_that_was_heard() -> None:
    log = ClientLog().submit().hear(5, ends="stop").end("r1", "length")
    assert log.sentence("one-ending") == "r1 came back with another finish reason than was heard"


def test_every_call_is_answered_once() -> None:
    assert ClientLog().ask("resume").close("stalled").sentence("api-truth") == "resume (call 0) was never answered"
    assert ClientLog().call("resume").answer("resume").sentence("api-truth") == "call 0 was answered and was not open"


def test_what_was_aborted_is_not_heard_of_again() -> None:
    log = ClientLog().submit().hear(5).ask("abort", ids=["r1"]).answer("abort", aborted=1).hear(6)
    assert log.sentence("api-truth") == "r1 went on although its abort had been answered"


@pytest.mark.parametrize(("before", "said"), [("pause", False), ("resume", True)])
def test_is_paused_says_what_the_answers_leave_no_doubt_of(before: str, said: bool) -> None:
    log = ClientLog().call(before).ask("is_paused").answer("is_paused", is_paused=said)
    assert log.sentence("flags-converge") == f"is_paused said {said} of an engine that is {'running' if said else 'paused'}"


def test_is_paused_may_say_either_while_a_call_is_on_its_way() -> None:
    log = ClientLog().call("pause").ask("resume").ask("is_paused").answer("is_paused", is_paused=False)
    assert log.judgement("flags-converge").status == "holds"


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        (ClientLog().submit(max_tokens=2).hear(5, 6, 7), "r1 has more tokens than it may have"),
        (ClientLog().submit(max_tokens=3).hear(5, ends="length"), "r1 ended by `length` where that is not so"),
        (ClientLog().submit(ignore_eos=True).hear(5, ends="stop"), "r1 ended by `stop`"),
        (
            ClientLog().submit().hear(5, ends="stop").end("r1", "stop", prompt_tokens=4),
            "r1 has its prompt counted as another length than was sent",
        ),
    ],
    ids=["too many", "too few", "stop", "prompt"],
)
def test_books_are_kept(log: ClientLog, sentence: str) -> None:
    assert log.sentence("bookkeeping-shape") == sentence


def versions(*spans: list[Any]) -> ClientLog:
    """Three tokens before a pause that brings v2, two after it."""
    log = ClientLog().submit(max_tokens=5).hear(5, 6, 7).call("pause", mode="keep")
    return swap(log, "v2").call("resume").hear(8, 9, ends="length").end(weight_versions=list(spans)).close()


@pytest.mark.parametrize(
    ("spans", "sentence"),
    [
        ([["default", 0, 3]], "r1's spans do not partition its output"),
        ([["default", 0, 5]], "r1's token 3 is labelled default, which cannot have been resident when it was sampled"),
        ([["v2", 0, 5]], "r1's token 0 is labelled v2, which cannot have been resident when it was sampled"),
        ([["default", 0, 2], ["v2", 2, 5]], "r1's token 2 is labelled v2, which cannot have been resident when it was sampled"),
    ],
    ids=["no partition", "of the old weights", "of the new weights", "shifted"],
)
def test_a_label_is_of_weights_that_may_have_sampled_the_token(spans: list[list[Any]], sentence: str) -> None:
    assert versions(*spans).sentence("version-attribution") == sentence


def test_right_labels_hold_and_without_any_nothing_is_known() -> None:
    assert versions(["default", 0, 3], ["v2", 3, 5]).judgement("version-attribution").status == "holds"
    silent = ClientLog().submit().hear(5, ends="stop").end("r1", "stop").close()
    assert silent.judgement("version-attribution").reason == "no request came back with weight versions"


def test_beside_an_update_that_is_on_its_way_a_token_may_have_either_label() -> None:
    log = ClientLog().submit(max_tokens=2).hear(5).ask("update_weight_version", version="v2", allow_unpaused=True).hear(6, ends="length")
    for spans in ([["default", 0, 2]], [["default", 0, 1], ["v2", 1, 2]]):
        end = {"finish_reason": "length", "prompt_tokens": 3, "output_tokens": 2, "weight_versions": spans}
        branch = ClientLog()
        branch.entries, branch._calls = [*log.entries], log._calls
        assert branch.answer("r1", **end).judgement("version-attribution").status == "holds"


# With the log of a rank beside the client's.

SUBMIT = "  - submit: {id: r1, prompt: {tokens: 6, seed: 1}, max_tokens: 12}\n"
PAUSE = "  - {when: {request: r1, tokens: 3}, pause: {mode: keep}, as: p}\n  - {when: {returned: p, ms: 5}, resume: {}}\n"


class Changes(SimLive):
    """Hands out another token than it sampled."""

    def hand_out(self, outputs: Any) -> None:
        super().hand_out([output._replace(tokens=tuple(token + 1 for token in output.tokens)) for output in outputs])


class Dawdles(SimLive):
    """Hands out a token a step late, over a pause's answer."""

    kept: tuple[Output, ...] = ()

    def hand_out(self, outputs: Any) -> None:
        late, self.kept = self.kept, tuple(output for output in outputs if output.finish_reason is None)
        super().hand_out([*late, *(output for output in outputs if output.finish_reason is not None)])


class Mislabels(SimLive):
    """Gives every token the label of the answer."""

    def ending(self, finished: Any) -> dict[str, Any]:
        return {**super().ending(finished), "weight_versions": [["v9", 0, finished.output_tokens]]}


class Flatters(SimLive):
    """Says that more was aborted than was."""

    def answer(self, op: int, content: dict[str, Any]) -> None:
        super().answer(op, {"aborted": 7} if "aborted" in content else content)


@pytest.mark.parametrize(
    ("engine", "invariant", "sentence"),
    [
        (Changes(), "token-conservation", "r1 was heard to have other tokens than were handed out"),
        (Dawdles(), "quiet-after-pause", "pause (call 1) was answered before its client had heard what was handed out"),
        (Mislabels(), "version-attribution", "r1 came back with other spans than the core reported"),
        (Flatters(), "api-truth", "abort (call 3) was answered otherwise than the core answered"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, SimLive) else "",
)
def test_what_a_client_is_told_is_what_the_core_did(tmp_path: Path, engine: SimLive, invariant: str, sentence: str) -> None:
    trial = run_live(tmp_path, SUBMIT + PAUSE + "  - {when: {request: r1, tokens: 9}, abort: {ids: [r1]}}\n", engine)
    violated = {judgement.invariant: judgement for judgement in trial.verdict.judgements if judgement.status == "violated"}
    assert violated[invariant].violations[0].sentence == sentence


class Forgets(SimLive):
    """Loses the tokens after the third of a request that is aborted, and counts without them."""

    def hand_out(self, outputs: Any) -> None:
        heard = (output for output in outputs if output.first < 3 or output.finish_reason is not None)
        super().hand_out([output._replace(first=min(output.first, 3)) for output in heard])

    def ending(self, finished: Any) -> dict[str, Any]:
        return {**super().ending(finished), "output_tokens": min(finished.output_tokens, 3)}


@pytest.mark.parametrize(("ended_by", "owed"), [("pause: {mode: abort}", True), ("abort: {ids: [r1]}", False)])
def test_a_client_gives_up_tokens_on_their_way_by_its_own_abort_alone(tmp_path: Path, ended_by: str, owed: bool) -> None:
    trial = run_live(tmp_path, SUBMIT + f"  - {{when: {{step: 6}}, {ended_by}}}\n", Forgets())
    found = {judgement.invariant: judgement for judgement in trial.verdict.judgements}["token-conservation"]
    assert [violation.sentence for violation in found.violations] == (
        ["r1 came back before all that was handed out for it was heard"] if owed else []
    )


def test_a_client_hears_no_more_than_was_handed_out(tmp_path: Path) -> None:
    class Invents(SimLive):
        def hand_out(self, outputs: Any) -> None:
            super().hand_out([output._replace(tokens=(*output.tokens, 9)) if output.finish_reason else output for output in outputs])

        def ending(self, finished: Any) -> dict[str, Any]:
            return {**super().ending(finished), "output_tokens": finished.output_tokens + 1}

    violated = {one.invariant: one for one in run_live(tmp_path, SUBMIT, Invents()).verdict.judgements if one.status == "violated"}
    (violation,) = violated["token-conservation"].violations
    assert violation.sentence == "r1 was heard to have other tokens than were handed out"
