"""What requests are called in logs."""

from __future__ import annotations

import pytest

from harness.live.handle import handle


def test_an_id_that_a_log_can_have_stays_as_it_is() -> None:
    assert handle("cmpl-7f3a-0-12ab34cd") == "cmpl-7f3a-0-12ab34cd"


@pytest.mark.parametrize("ids", [("mine alone", "mine aloud"), ("\ud800", "\ud801"), ("x" * 500, "x" * 501), ("", " ")])
def test_other_ids_are_told_apart_by_what_a_log_can_have(ids: tuple[str, str]) -> None:
    first, second = map(handle, ids)
    assert first != second and max(len(first), len(second)) <= 64
    assert (handle(first), handle(second)) == (first, second)
