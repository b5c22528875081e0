"""Every known failure is planted or said to be out of reach, and a fault that was planted is gone afterwards."""

from __future__ import annotations

from types import ModuleType

import pytest

from harness.errors import BadInput
from harness.faults import CANARY, CONFORMANCE, DEADLOCK, FAULTS, Fault, fault_named
from harness.faults.page import MEASURED, OUT_OF_REACH, line, page
from harness.invariants import INVARIANTS

from .conftest import ROOT

KNOWN = [f"K{number:02}" for number in range(1, 48)]


def test_every_known_failure_is_planted_or_out_of_reach() -> None:
    assert sorted([*(id for id in FAULTS if id in KNOWN), *OUT_OF_REACH]) == KNOWN


def test_every_kin_that_is_named_exists() -> None:
    named = [word for why in OUT_OF_REACH.values() for word in why.split("`")[1::2]]
    assert named
    assert not [name for name in named if name not in FAULTS]


def test_every_invariant_has_a_fault() -> None:
    assert set(INVARIANTS) <= {fault.caught_by for fault in FAULTS.values()}


def test_the_canary_is_shallow() -> None:
    assert FAULTS[CANARY].shallow


def test_an_unknown_fault_is_refused_by_name() -> None:
    with pytest.raises(BadInput, match="no fault 'K99'; there are K01, K02"):
        fault_named("K99")


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_changes_something_and_is_gone_after_its_block(fault: Fault) -> None:
    pytest.importorskip("torch")
    places: list[tuple[object, str, object]] = []
    fault.plant(lambda owner, name, value: places.append((owner, name, vars(owner)[name])))
    assert places
    with pytest.raises(ZeroDivisionError), fault.planted():
        assert all(vars(owner)[name] is not before for owner, name, before in places)
        raise ZeroDivisionError
    assert all(vars(owner)[name] is before for owner, name, before in places)


def module(**hooks: object) -> ModuleType:
    made = ModuleType("harness.faults.engine.made_up", "What is wrong.")
    vars(made).update({"STANDS_FOR": "own", "CAUGHT_BY": "one-ending", "SHALLOW": True, "plant": lambda patch: None, **hooks})
    return made


def test_a_fault_is_read_from_its_module() -> None:
    fault = Fault.from_module(module(), "engine")
    assert (fault.id, fault.says, fault.caught_by, fault.shallow) == ("made-up", "What is wrong.", "one-ending", True)


@pytest.mark.parametrize("hook", ["__doc__", "STANDS_FOR", "CAUGHT_BY", "SHALLOW", "plant"])
def test_a_fault_without_a_hook_is_refused(hook: str) -> None:
    with pytest.raises(TypeError, match=f"lacks {hook}$"):
        Fault.from_module(module(**{hook: None}), "engine")


def test_a_fault_that_nothing_is_to_catch_is_refused() -> None:
    with pytest.raises(TypeError, match="is to be caught by 'luck', which is no invariant"):
        Fault.from_module(module(CAUGHT_BY="luck"), "engine")
    with pytest.raises(TypeError, match="which is no invariant"):
        Fault.from_module(module(CAUGHT_BY=DEADLOCK), "engine")
    assert Fault.from_module(module(CAUGHT_BY=CONFORMANCE), "engine").caught_by == CONFORMANCE
    assert Fault.from_module(module(CAUGHT_BY=DEADLOCK), "ranks").caught_by == DEADLOCK


def rows(text: str) -> list[list[str]]:
    """The cells of the page's tables, without what a drill measured."""
    cells = [row.strip("| ").split(" | ") for row in text.splitlines() if row.startswith("| `")]
    return [row[:-MEASURED] for row in cells]


def test_the_page_is_current_but_for_what_was_measured() -> None:
    written = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    generated = page({})
    assert rows(written) == rows(generated), "write it again: caesura drill --page docs/faults.md"
    assert [text for text in written.splitlines() if not text.startswith("| `")] == [
        text for text in generated.splitlines() if not text.startswith("| `")
    ], "write it again: caesura drill --page docs/faults.md"


def test_the_page_shows_what_was_measured() -> None:
    written = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")
    measured = [row.strip("| ").split(" | ")[-MEASURED:] for row in written.splitlines() if row.startswith("| `")]
    assert len(measured) == len(FAULTS)
    assert not [row for row in measured if "-" in row[:2]]
    assert callable(line)
