"""bookkeeping-shape: a request's books are right."""

from __future__ import annotations

from harness.events import Finished, Freed, Preempted, VersionSpan
from harness.operations import Prompt, Submit

from .logs import Timeline, said

ID = "bookkeeping-shape"


def two_of(max_tokens: int, *, max_model_len: int = 64, ignore_eos: bool = False, eos: tuple[int, ...] = ()) -> Timeline:
    """r1 has sampled two tokens."""
    log = Timeline(max_model_len=max_model_len, eos=eos)
    log.take_up(Submit(id="r1", prompt=Prompt(tokens=(20, 21)), max_tokens=max_tokens, ignore_eos=ignore_eos))
    log.taken_on("r1", prompt_tokens=2).answer({"state": "queued"})
    return log.admit("r1", [0]).step(("r1", 0, 2), r1=7).launch(("r1", 2, 1)).land(r1=8)


def test_a_request_ends_at_its_limit():
    assert two_of(2).finish("r1", head=(0,)).deliver(r1="length").close().holds(ID)


def test_a_request_ends_at_the_limit_of_the_model():
    assert two_of(9, max_model_len=4).finish("r1", head=(0,)).deliver(r1="length").close().holds(ID)


def test_no_token_beyond_max_tokens():
    violation = two_of(1).violation(ID)
    assert said(violation) == (
        "step 2 sampled a token beyond the limit of r1",
        "at most 1 output tokens: max_tokens 1, max_model_len 32 less 2 of the prompt",
        "token 2",
    )


def test_no_token_beyond_max_tokens_in_a_later_life():
    log = two_of(2).deliver().add(Preempted(request="r1", by=None), Freed(request="r1", head=(0,), tail=()))
    assert log.admit("r1", [0, 1], life=2).launch(("r1", 0, 4)).land(r1=9).violation(ID).got == "token 3"


def test_length_is_no_reason_before_the_limit():
    violation = two_of(5).finish("r1", head=(0,)).violation(ID)
    assert said(violation) == (
        "r1 ended by `length` where that is not so",
        "5 output tokens: max_tokens 5, max_model_len 32 less 2 of the prompt",
        "2",
    )


def test_stop_needs_a_token_that_ends_a_sequence():
    assert two_of(5, eos=(8,)).finish("r1", "stop", head=(0,)).holds(ID)
    violation = two_of(5, eos=(3,)).finish("r1", "stop", head=(0,)).violation(ID)
    assert said(violation) == ("r1 ended by `stop` where that is not so", "a last token of (3,)", "last token 8")


def test_stop_is_no_reason_if_it_was_to_be_ignored():
    violation = two_of(5, eos=(8,), ignore_eos=True).finish("r1", "stop", head=(0,)).violation(ID)
    assert violation.expected == "no such end: ignore_eos was asked for"


def test_the_prompt_is_counted_as_it_was_sent():
    spans = (VersionSpan("default", 0, 2),)
    violation = two_of(2).add(Finished(request="r1", reason="length", prompt_tokens=3, output_tokens=2, spans=spans)).violation(ID)
    assert said(violation) == ("r1's prompt is counted as another length than was sent", "prompt_tokens 2", "prompt_tokens 3")
