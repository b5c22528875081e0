"""A scenario as a script that shows the same without Caesura: what to attach to a report to vLLM.

The timeline is carried out on the model under vLLM's profile, so that every trigger becomes a place in a
list of calls and steps; the script makes these on real vLLM with random weights. Of the first promise that
the model breaks there, it looks at the call that shows it: how it returned, who was live then, whether the
engine was paused, and whether the prefix cache held anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from harness.backends import EngineInfo
from harness.backends.sim import SimBackend
from harness.errors import BadInput
from harness.events import Called, Closed, Entry, Event, Finished, Opened, Returned
from harness.execute import Lockstep
from harness.invariants import Judge
from harness.model import EngineModel, Profile
from harness.operations import Abort, Pause, Submit, SwapWeights, UpdateWeights, from_data
from harness.replay import Replay
from harness.scenario import EngineShape, Scenario
from harness.trial import opened_event
from harness.verdict import Violation

LINES_MAX = 80
TARGETS = ("vllm",)


class Observation(NamedTuple):
    """What a script sees when a call returns."""

    outcome: str
    """"ok" or "refused"."""
    live: list[str]
    paused: bool
    cached: bool
    """The prefix cache holds a block."""
    labels: dict[str, list[tuple[str, int, int]]]
    """Which output tokens of each request that came to its end which weight version was said to have sampled."""


class ProfiledSim(SimBackend):
    """The model under a profile other than the default."""

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        self._profile = profile

    def start(self, shape: EngineShape) -> EngineInfo:
        self._model = EngineModel(shape, profile=self._profile)
        return EngineInfo(versions={}, device="none", profile=self._profile.name, eos_token_ids=())


def script(scenario: Scenario, *, to: str, profile: str) -> str:
    """The script, of at most LINES_MAX lines; it imports nothing but vllm and exits 1 while vLLM does what the profile says.

    Args:
        to: one of TARGETS.
        profile: the name of the model's profile that says what the engine does.

    Raises:
        BadInput: target or profile are unknown; or under this profile the scenario breaks no promise, the promise is not
            broken in a call, or the script is too long.
    """
    if to not in TARGETS:
        raise BadInput(f"--to {to}: expected one of {', '.join(TARGETS)}")
    try:
        recorded = _Recorded(scenario, Profile.named(profile))
    except ValueError as error:
        raise BadInput(f"--profile: {error}") from error
    violation = recorded.first_violation()
    op = recorded.call_that_shows(violation)
    shape = scenario.engine
    text = (Path(__file__).parent / "export_vllm.py.in").read_text()
    fields = {
        "NAME": scenario.name,
        "PROMISE": f"{violation.invariant}: {violation.sentence}; expected {violation.expected}",
        "PROFILE": profile,
        "ENGINE": _engine_arguments(shape),
        "ACTIONS": _literal(recorded.up_to[op]),
        "OP": op,
        "EXPECTED": tuple(recorded.observations[op]),
    }
    for name, value in fields.items():
        text = text.replace(f"@{name}@", value if isinstance(value, str) else repr(value))
    if (lines := text.count("\n")) > LINES_MAX:
        raise BadInput(
            f"{scenario.path or scenario.name}: the script would have {lines} lines, at most {LINES_MAX} are allowed: shrink it first"
        )
    return text


class _Recorded:
    """A run of the scenario on the model: its calls and steps in order, and what was seen when each call returned."""

    def __init__(self, scenario: Scenario, profile: Profile) -> None:
        self.actions: list[tuple[Any, ...]] = []
        self.observations: dict[int, Observation] = {}
        self.up_to: dict[int, list[tuple[Any, ...]]] = {}
        """For each call, the actions until it had returned."""
        self._name = str(scenario.path or scenario.name)
        self._entries: list[Entry] = []
        self._replay = Replay()
        self._labels: dict[str, list[tuple[str, int, int]]] = {}
        self._judge = Judge()
        backend = ProfiledSim(profile)
        info = backend.start(scenario.engine)
        run = Lockstep(scenario, backend, [self._note, self._judge.feed])
        run.run(opened_event(scenario.engine, backend, info, digest="", seed=0))
        self._violations = [one for judgement in self._judge.finish() for one in judgement.violations]

    def first_violation(self) -> Violation:
        if not self._violations:
            raise BadInput(f"{self._name}: no promise is broken under this profile, so there is nothing for a script to show")
        return min(self._violations, key=lambda one: one.seq)

    def call_that_shows(self, violation: Violation) -> int:
        """The call whose return, in the transaction of the violation, is the first from there on."""
        for entry in self._entries[violation.seq :]:
            if isinstance(entry.event, Returned):
                return entry.event.op
        raise BadInput(
            f"{self._name}: {violation.invariant} is broken in a step and no call returns after it: a script has nothing to look at"
        )

    def _note(self, entries: Sequence[Entry]) -> None:
        self._entries += entries
        if not isinstance(entries[0].event, Opened | Called | Closed):
            steps = self.actions.pop()[2] if self.actions and self.actions[-1][1] == "step" else 0
            self.actions.append((-1, "step", steps + 1))
        for entry in entries:
            self._replay.apply(entry)
            self._note_event(entry.event)

    def _note_event(self, event: Event) -> None:
        if isinstance(event, Called):
            self.actions.append((event.op, *_action(event.operation)))
        elif isinstance(event, Finished) and event.reason != "abort":
            self._labels[event.request] = [(span.version, span.start, span.end) for span in event.spans]
        elif isinstance(event, Returned):
            state = self._replay.state()
            live = sorted(request.id for request in (*state.running, *state.waiting))
            self.up_to[event.op] = list(self.actions)
            self.observations[event.op] = Observation(
                "refused" if event.error else "ok", live, state.pause_mode is not None, bool(state.digests), dict(self._labels)
            )


def _action(data: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """A call as its verb and plain arguments."""
    operation = from_data(data)
    if isinstance(operation, Submit):
        prompt = list(operation.prompt.token_ids or ())
        return operation.verb, {"id": operation.id, "prompt": prompt, "max_tokens": operation.max_tokens}
    if isinstance(operation, SwapWeights | UpdateWeights):
        version = operation.version if isinstance(operation, SwapWeights) else None
        return operation.verb, {"fails": operation.fails, **({"version": version} if version is not None else {})}
    return operation.verb, operation.model_dump(mode="json", exclude_defaults=not isinstance(operation, Pause | Abort))


def _engine_arguments(shape: EngineShape) -> str:
    names = ("block_size", "max_num_seqs", "max_num_batched_tokens", "long_prefill_token_threshold", "async_scheduling")
    fields = {name: getattr(shape, name) for name in names}
    fields |= {"max_model_len": min(shape.max_model_len, shape.num_blocks * shape.block_size)}
    fields |= {"num_gpu_blocks_override": shape.num_blocks + 1, "enable_prefix_caching": shape.prefix_caching}
    return _literal(fields)


def _literal(value: Any) -> str:
    """Source text of plain data, wrapped at its blanks: none of its strings has one."""
    return fill(repr(value), width=130, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
