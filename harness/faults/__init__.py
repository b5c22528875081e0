"""Planted faults: every way of being wrong that this project knows, to try the tool on.

`FAULTS` holds them by id, `Fault.planted` plants one, and `caesura drill` finds them all. docs/faults.md lists them.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from harness.errors import BadInput
from harness.faults import adapter, engine, ranks
from harness.faults.fault import CONFORMANCE, DEADLOCK, Fault

__all__ = ["CANARY", "CONFORMANCE", "DEADLOCK", "FAULTS", "Fault", "fault_named"]

CANARY = "canary"
"""The fault that nobody can miss: if it is missed, a drill says nothing."""


def _load() -> Iterator[Fault]:
    for mutates, package in (("engine", engine), ("adapter", adapter), ("ranks", ranks)):
        for name in sorted(module.name for module in iter_modules(package.__path__)):
            yield Fault.from_module(import_module(f"{package.__name__}.{name}"), mutates)  # type: ignore[arg-type]


FAULTS: dict[str, Fault] = {fault.id: fault for fault in sorted(_load(), key=lambda fault: (fault.id[0] != "K", fault.id))}
"""Every fault by its id: known failures by number, then the others."""


def fault_named(id: str) -> Fault:
    """The fault of that id.

    Raises:
        BadInput: there is none; the message lists those that there are.
    """
    if id not in FAULTS:
        raise BadInput(f"no fault {id!r}; there are {', '.join(FAULTS)}")
    return FAULTS[id]
