"""Symbolic tokens: the same everywhere, different wherever something could be confused."""

from __future__ import annotations

from harness.model.symbolic import symbolic_token
from harness.operations import PROMPT_VOCABULARY


def sequence(request="r1", *, length=200, epoch=0, seed=0):
    return [symbolic_token(request, position, epoch, seed) for position in range(length)]


def test_tokens_are_the_same_on_every_machine():
    assert sequence(length=8) == [83, 255, 52, 221, 122, 46, 28, 155]


def test_tokens_are_of_the_prompt_vocabulary_and_use_it_all():
    drawn = [token for index in range(20) for token in sequence(f"r{index}")]
    assert sorted(dict.fromkeys(drawn)) == list(PROMPT_VOCABULARY)


def test_requests_positions_epochs_and_seeds_have_tokens_of_their_own():
    mine = sequence()
    for other in (sequence("r2"), sequence("1r"), sequence(epoch=1), sequence(seed=1), sequence(length=201)[1:]):
        assert sum(a == b for a, b in zip(mine, other, strict=True)) < 8, "about 200 / 240 agree by chance"
