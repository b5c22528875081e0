"""token-conservation: what clients get is what was sampled."""

from __future__ import annotations

from harness.events import Delivered, Finished, Landed, Output, Preempted, Sampled, VersionSpan

from .logs import Timeline, said

ID = "token-conservation"


def two_tokens() -> Timeline:
    """r1 has a prompt of three tokens and was given two."""
    log = Timeline().submit("r1", [20, 21, 22]).admit("r1", [0])
    return log.step(("r1", 0, 3), r1=7).launch(("r1", 3, 1)).land(r1=8).deliver()


def delivered(log: Timeline, *outputs: Output) -> Timeline:
    return log.add(Delivered(outputs=outputs))


def test_every_token_delivered_once_holds():
    assert two_tokens().launch(("r1", 4, 1)).land(r1=9).finish("r1", head=(0,)).deliver(r1="length").close().holds(ID)


def test_an_aborted_request_is_told_its_end_without_tokens():
    assert two_tokens().abort("r1", head={"r1": (0,)}).close().holds(ID)


def test_a_preempted_request_goes_on_where_it_was():
    log = two_tokens().add(Preempted(request="r1", by=None)).admit("r1", [1, 2], life=2)
    assert log.step(("r1", 0, 5), r1=9).holds(ID)


def test_a_lost_token_is_told_at_the_next_delivery():
    log = delivered(two_tokens().launch(("r1", 4, 1)).land(r1=9).launch(("r1", 5, 1)).land(r1=10), Output("r1", 3, (10,), None))
    assert said(log.violation(ID)) == ("r1 lost 1 tokens on the way to its client", "from token 2: [9]", "from token 3: [10]")


def test_a_token_delivered_twice():
    log = delivered(two_tokens(), Output("r1", 1, (8,), None))
    assert said(log.violation(ID)) == ("r1 was delivered token 1 twice", "from token 2: []", "from token 1: [8]")


def test_a_token_twice_in_one_delivery():
    log = two_tokens().launch(("r1", 4, 1)).land(r1=9)
    log = delivered(log, Output("r1", 2, (9,), None), Output("r1", 2, (9,), None))
    assert log.violation(ID).sentence == "r1 was delivered token 2 twice"


def test_other_tokens_than_were_sampled():
    log = delivered(two_tokens().launch(("r1", 4, 1)).land(r1=9), Output("r1", 2, (6,), None))
    assert said(log.violation(ID)) == ("r1 was delivered other tokens than were sampled", "from token 2: [9]", "from token 2: [6]")


def test_a_token_that_no_step_sampled():
    log = delivered(two_tokens(), Output("r1", 2, (6,), None))
    assert said(log.violation(ID)) == ("r1 was delivered tokens that no step sampled", "from token 2: []", "from token 2: [6]")


def test_a_shifted_request_is_reported_once():
    log = delivered(two_tokens(), Output("r1", 3, (), None))
    assert log.launch(("r1", 4, 1)).land(r1=9).violation(ID).seq == log.last(Delivered)
    for token in range(9):
        log.launch(("r1", 5 + token, 1)).land(r1=9)
        delivered(log, Output("r1", 3 + token, (9,), None))
    assert log.judgement(ID).more == 0
    assert log.violation(ID).sentence == "r1 lost 1 tokens on the way to its client"


def test_tokens_of_an_unknown_request():
    log = delivered(Timeline(), Output("r9", 0, (7,), None))
    assert said(log.violation(ID)) == (
        "tokens were delivered for r9, which the engine never took on",
        "outputs of accepted requests only",
        "1 tokens, finish reason None",
    )


def test_an_end_that_never_reached_its_client():
    log = two_tokens().finish("r1", "abort", head=(0,)).close()
    violation = log.violation(ID)
    assert said(violation) == (
        "r1 finished and its client was never told",
        "its finish reason delivered once",
        "no `delivered` with a finish reason",
    )
    assert [(cause.seq, cause.what) for cause in violation.cause] == [(log.last(Finished), "r1 finished")]


def test_an_id_used_again_does_not_hide_an_end_that_was_lost():
    log = two_tokens().finish("r1", "abort", head=(0,)).submit("r1", [20]).abort("r1").close()
    assert log.violation(ID).sentence == "r1 finished and its client was never told"


def test_an_end_that_was_not_delivered_before_an_interruption_is_no_loss():
    assert two_tokens().finish("r1", "abort", head=(0,)).close("interrupted").holds(ID)


def test_a_finish_reason_delivered_twice():
    log = two_tokens().abort("r1", head={"r1": (0,)})
    delivered(log, Output("r1", 2, (), "abort"))
    assert [said(violation) for violation in log.judgement(ID).violations] == [
        ("r1 was delivered more after its finish reason", f"nothing after event {log.last(Delivered) - 2}", "from token 2: []"),
        ("r1's finish reason was delivered twice", "once", "abort again"),
    ]


def test_another_finish_reason_than_it_had():
    log = delivered(two_tokens().finish("r1", "length", head=(0,)), Output("r1", 2, (), "stop"))
    assert said(log.violation(ID)) == ("r1 was told another finish reason than it had", "length", "stop")


def test_an_end_delivered_while_live():
    log = delivered(two_tokens(), Output("r1", 2, (), "length"))
    assert said(log.violation(ID)) == ("r1's end was delivered while it was live", "no finish reason", "length")


def test_an_end_without_the_last_token():
    log = two_tokens().launch(("r1", 4, 1)).land(r1=9).finish("r1", head=(0,))
    delivered(log, Output("r1", 2, (), "length"))
    assert said(log.violation(ID)) == ("r1 ended with tokens that never reached its client", "3 tokens delivered", "2, missing [9]")


def test_tokens_of_a_live_request_left_behind_at_the_end():
    log = two_tokens().launch(("r1", 4, 1)).land(r1=9).close("paused")
    assert said(log.violation(ID)) == ("r1 has tokens that never reached its client", "3 tokens delivered", "2")


def test_a_row_at_the_last_token_samples():
    log = two_tokens().launch(("r1", 4, 1)).land()
    assert said(log.violation(ID)) == (
        "step 3 did not sample one token for each row that reached its request's last token",
        "tokens for [r1]",
        "tokens for []",
    )


def test_a_partial_prefill_samples_nothing():
    log = Timeline().submit("r1", range(20, 26)).admit("r1", [0, 1]).launch(("r1", 0, 4)).land(r1=7)
    assert log.violation(ID).expected == "tokens for []"


def test_a_step_samples_once():
    log = two_tokens().launch(("r1", 4, 1)).add(Landed(step=3, sampled=(Sampled("r1", 9), Sampled("r1", 9))))
    assert log.violation(ID).got == "tokens for [r1, r1]"


def test_a_token_in_flight_of_an_aborted_request_is_no_loss():
    log = two_tokens().launch(("r1", 4, 1)).abort("r1", head={"r1": (0,)}).land()
    assert log.close().holds(ID)


def test_a_step_that_never_lands():
    log = two_tokens().launch(("r1", 4, 1)).close("paused")
    assert said(log.violation(ID)) == ("step 3 never landed", "tokens for [r1]", "no `landed`")


def test_a_step_is_launched_once():
    log = two_tokens().launch(("r1", 4, 1))
    log.add(log.entries[-1].event)
    assert said(log.violation(ID)) == (
        "step 3 was launched twice",
        "landed before another of its number",
        "two in flight, of which one's tokens are lost",
    )


def test_a_step_that_was_never_launched():
    log = Timeline().add(Landed(step=4, sampled=()))
    assert said(log.violation(ID)) == ("step 4 landed without having been launched", "a step in flight: []", "tokens of step 4")


def test_an_end_that_counts_other_tokens_than_were_sampled():
    spans = (VersionSpan("default", 0, 3),)
    log = two_tokens().add(Finished(request="r1", reason="length", prompt_tokens=3, output_tokens=3, spans=spans))
    assert said(log.violation(ID)) == (
        "r1 ended with another number of tokens than were sampled for it",
        "output_tokens 2",
        "output_tokens 3",
    )


def test_a_step_computes_only_tokens_that_exist():
    violation = two_tokens().launch(("r1", 4, 3)).land(r1=9).violation(ID)
    assert said(violation) == (
        "step 3 computes tokens of r1 that do not exist",
        "positions below 5: 5 tokens are known",
        "position 6",
    )


def test_a_token_in_flight_may_be_computed_and_the_one_after_it_not():
    log = two_tokens().launch(("r1", 4, 1)).launch(("r1", 5, 1))
    assert log.holds(ID)
    violation = log.launch(("r1", 6, 2)).violation(ID)
    assert (violation.expected, violation.got) == ("positions below 7: 5 tokens are known, 2 in flight", "position 7")


def test_a_step_computes_a_request_once():
    violation = two_tokens().launch(("r1", 4, 1), ("r1", 4, 1)).land(r1=9).violation(ID)
    assert said(violation) == ("step 3 computes r1 twice", "one row", "another, from position 4")
