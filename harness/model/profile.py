"""What engines that follow the same rules do differently, as data.

A field exists only where an engine in use departs from docs/semantics.md. Conformance
compares an engine with its own profile; invariants judge every engine by the promises.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The defaults are what the contract promises and our engine does."""

    name: str

    empty_steps: bool = False
    """A request that ended keeps the engine stepping until one more step, empty if need be,
    has told the workers (vLLM). An empty step launches an empty batch and counts as a step;
    a pause of any mode is pending until it was made."""

    wait_admits_waiting: bool = True
    """A pending `wait` still admits requests accepted before it. False: only those running then
    run to their end; whoever waits or is preempted stays in the queue until resume (vLLM's PAUSED_NEW)."""

    uncached_freed_to: Literal["head", "tail"] = "head"
    """Where in the free queue released blocks go when prefix caching is off (vLLM 0.27.1: the tail).
    With caching on, blocks without a digest go to the head everywhere."""

    @classmethod
    def named(cls, name: str) -> Profile:
        """The profile of that name.

        Raises:
            ValueError: there is none; the message lists the known names.
        """
        for profile in PROFILES:
            if profile.name == name:
                return profile
        known = ", ".join(profile.name for profile in PROFILES)
        raise ValueError(f"got profile {name!r}, expected one of: {known}")


CAESURA = Profile(name="caesura")
"""What contract.md promises: the profile of our own engine."""

PROFILES = (CAESURA,)
"""Every profile that a scenario can name."""
