"""What a planted fault is: a switchable way of being wrong, and the invariant that must notice.

A fault is a module in a folder named after what it mutates. Its docstring says what is wrong, and it has the same
hooks in the same order: `STANDS_FOR`, `CAUGHT_BY`, `SHALLOW`, `ENGINE` if it shows in some engines only, `plant`.
A tool that finds failures is believed as far as it finds these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal
from unittest import mock

from harness.invariants import INVARIANTS

Patch = Callable[[Any, str, Any], object]
"""patch(owner, name, value): replaces an attribute of a class or module until the fault is taken out again."""

Mutates = Literal["engine", "adapter", "ranks"]

CONFORMANCE = "conformance"
"""In place of an invariant: no promise is broken, and only the model, asked to explain the log, sees it."""
DEADLOCK = "deadlock"
"""What the explorer of ranks calls a state from which nothing can end."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One planted fault."""

    id: str
    """`K31` for a known failure, otherwise the module's name with dashes."""
    name: str
    """The module's name: what files about it are called."""
    says: str
    """What is wrong, in a sentence."""
    mutates: Mutates
    stands_for: str
    """The public report that it brings back, as `repository#number`, or the kind of failure that it belongs to."""
    caught_by: str
    """Id of the invariant that must notice, or CONFORMANCE, or DEADLOCK."""
    shallow: bool
    """Whether a few dozen operations are to find it: half of the time in fewer than 200."""
    engine: tuple[tuple[str, Any], ...] = ()
    """Fields of the engine's shape that it takes to show it, with their values; the others are drawn."""
    plant: Callable[[Patch], None]

    @classmethod
    def from_module(cls, module: ModuleType, mutates: Mutates) -> Fault:
        """Read a fault's hooks.

        Raises:
            TypeError: a hook is missing, or `CAUGHT_BY` names no invariant.
        """
        missing = [hook for hook in ("__doc__", "STANDS_FOR", "CAUGHT_BY", "SHALLOW", "plant") if getattr(module, hook, None) is None]
        if missing:
            raise TypeError(f"the fault {module.__name__} lacks {', '.join(missing)}")
        if module.CAUGHT_BY not in (*INVARIANTS, CONFORMANCE, *((DEADLOCK, "collective-symmetry") if mutates == "ranks" else ())):
            raise TypeError(f"the fault {module.__name__} is to be caught by {module.CAUGHT_BY!r}, which is no invariant")
        name = module.__name__.rpartition(".")[2]
        number, _, _ = name.partition("_")
        known = number[0] == "k" and number[1:].isdigit()
        return cls(
            id=number.upper() if known else name.replace("_", "-"),
            name=name,
            says=" ".join((module.__doc__ or "").split()),
            mutates=mutates,
            stands_for=module.STANDS_FOR,
            caught_by=module.CAUGHT_BY,
            shallow=module.SHALLOW,
            engine=tuple(getattr(module, "ENGINE", {}).items()),
            plant=module.plant,
        )

    @contextmanager
    def planted(self) -> Iterator[None]:
        """The fault is in the process for the block, and gone after it, whatever happens there."""
        with ExitStack() as stack:
            self.plant(lambda owner, name, value: stack.enter_context(mock.patch.object(owner, name, value)))
            yield
