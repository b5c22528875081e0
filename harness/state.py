"""The visible state of an engine: what two engines must agree on after every operation and step.

Backends read it from an engine, the model from itself, replay from a log. It is
canonical: equal states are equal values, whatever the engine's own data
structures and hash values are.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import msgspec

from harness.events import Tag

Status = Literal["waiting", "running", "preempted"]


class RequestState(msgspec.Struct, frozen=True, kw_only=True):
    """A live request that the core has taken on."""

    id: str
    status: Status
    num_prompt_tokens: int
    output: tuple[int, ...]
    """Generated tokens so far."""
    num_computed_tokens: int
    num_preemptions: int
    blocks: tuple[int, ...]
    num_output_placeholders: int = 0
    """Tokens that steps in flight will sample for it; `num_computed_tokens` counts their positions as soon as
    a step is launched that computes them. 0 under synchronous scheduling."""
    parked: bool
    """Accepted while paused: not admitted before resume or a later `wait`."""


class EngineState(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be compared. Block ids run from 0 to num_blocks - 1."""

    running: tuple[RequestState, ...]
    """In order of admission."""
    waiting: tuple[RequestState, ...]
    """Preempted ones included, head first."""
    blocked: tuple[str, ...]
    """Ids held in front of the core by the late-request policy `block`."""
    references: tuple[int, ...]
    """Reference count of each block."""
    digests: tuple[tuple[int, ...], ...]
    """Blocks that share a digest, each group in order of registration, groups by their smallest block."""
    free: tuple[int, ...]
    """The free queue, head first; cached blocks without a reference stand in it too."""
    pause_mode: Literal["abort", "wait", "keep"] | None
    """None while not paused; set from the moment that the call is taken up."""
    pause_pending: bool
    """A pause was taken up and is not yet effective."""
    weight_version: str
    update_open: bool
    """A weight session is open."""
    out_of_service: bool
    asleep: tuple[Tag, ...] = ()
    """Whose memory is given back, in alphabetical order."""
    sleep_level: int | None = None
    """None while awake."""
    host: tuple[int, ...] = ()
    """Slots of the host tier that hold a copy, the least recently used first."""


class Difference(NamedTuple):
    """One place in which two states differ."""

    place: str
    """A field of EngineState, or `REQUEST.FIELD`."""
    expected: Any
    got: Any


def differences(expected: EngineState, got: EngineState) -> list[Difference]:
    """Every field that differs; requests are compared field by field where a queue's order is the same."""
    found = []
    for name in EngineState.__struct_fields__:
        want, have = getattr(expected, name), getattr(got, name)
        if want == have:
            continue
        if name in ("running", "waiting"):
            found += _queue_differences(name, want, have)
        else:
            found.append(Difference(name, want, have))
    return found


def _queue_differences(queue: str, expected: tuple[RequestState, ...], got: tuple[RequestState, ...]) -> list[Difference]:
    want_ids, have_ids = [r.id for r in expected], [r.id for r in got]
    if want_ids != have_ids:
        return [Difference(queue, want_ids, have_ids)]
    return [
        Difference(f"{want.id}.{name}", getattr(want, name), getattr(have, name))
        for want, have in zip(expected, got, strict=True)
        for name in RequestState.__struct_fields__
        if getattr(want, name) != getattr(have, name)
    ]
