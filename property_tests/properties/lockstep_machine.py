"""A hypothesis state machine that drives an engine and the model together.

After every operation and step, the model must explain what the engine did, event by event, and the
engine's whole visible state, the model's and the one replayed from the log must be equal; every
invariant watches. Pools have 4 to 12 blocks, so that preemption, eviction and sharing happen all the
time. At the end the engine is brought back into service and left running until nothing is live.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from harness.backends import Backend
from harness.conformance import Explainer
from harness.events import Called, Closed, Entry
from harness.execute import Journal
from harness.invariants import Judge
from harness.operations import (
    Abort,
    FinishWeightUpdate,
    IsPaused,
    Operation,
    Pause,
    Perturbation,
    Prompt,
    ResetPrefixCache,
    Resume,
    StartWeightUpdate,
    Submit,
    SwapWeights,
    TokenRun,
    UpdateWeights,
    UpdateWeightVersion,
    WeightSource,
    to_data,
)
from harness.scenario import EngineShape
from harness.trial import opened_event
from reports.words import timeline_row

HANDLES = tuple(f"r{number}" for number in range(1, 7))
VERSIONS = ("v1", "v2", "v3")
STEPS_TO_DRAIN = 2_000

shapes = st.builds(
    EngineShape,
    checkpoint=st.just("tiny"),
    block_size=st.integers(2, 4),
    num_blocks=st.integers(4, 12),
    max_model_len=st.integers(12, 40),
    max_num_seqs=st.integers(1, 4),
    max_num_batched_tokens=st.integers(4, 16),
    prefix_caching=st.sampled_from([True, True, True, False]),
    long_prefill_token_threshold=st.sampled_from([0, 0, 3]),
    late_requests=st.sampled_from(["queue", "queue", "reject", "block"]),
)
prompts = st.builds(
    Prompt,
    tokens=st.integers(1, 10),
    seed=st.integers(0, 3),
    prefix=st.one_of(st.none(), st.builds(TokenRun, tokens=st.integers(2, 9), seed=st.integers(0, 1))),
)
sources = st.one_of(
    st.just(WeightSource(original=True)),
    st.builds(lambda seed: WeightSource(perturb=Perturbation(seed=seed, scale=0.5)), st.integers(0, 2)),
)
modes = st.sampled_from(["abort", "wait", "keep", "keep"])
rarely = st.integers(0, 7).map(lambda draw: draw == 7)


class LockstepMachine(RuleBasedStateMachine):
    """Set `make_backend` in a subclass."""

    make_backend: Callable[[], Backend]

    @initialize(shape=shapes)
    def start(self, shape: EngineShape) -> None:
        self.backend = type(self).make_backend()
        info = self.backend.start(shape)
        self.explainer, self.judge = Explainer(), Judge()
        self.rows: list[str] = []
        self.journal = Journal("r0", [self._remember, self.explainer.feed, self._compare_states, self._judge])
        self.ops = 0
        self.journal.write([opened_event(shape, self.backend, info, digest="", seed=0)])

    @rule(id=st.sampled_from(HANDLES), prompt=prompts, max_tokens=st.integers(1, 14), salt=st.sampled_from([None, None, "a", "b"]))
    def submit(self, id: str, prompt: Prompt, max_tokens: int, salt: str | None) -> None:
        self.call(Submit(id=id, prompt=prompt, max_tokens=max_tokens, cache_salt=salt))

    @rule(count=st.integers(1, 4))
    @precondition(lambda self: self.backend.has_work())
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.backend.has_work():
                self.journal.write(self.backend.step())

    @rule(ids=st.lists(st.sampled_from(HANDLES), min_size=1, max_size=3))
    def abort(self, ids: list[str]) -> None:
        self.call(Abort(ids=tuple(ids)))

    @rule()
    def abort_all(self) -> None:
        self.call(Abort(ids="all"))

    @rule(mode=modes, clear_cache=st.booleans())
    def pause(self, mode: str, clear_cache: bool) -> None:
        self.call(Pause(mode=mode, clear_cache=clear_cache))

    @rule()
    def resume(self) -> None:
        self.call(Resume())

    @rule()
    def is_paused(self) -> None:
        self.call(IsPaused())

    @rule()
    def reset_prefix_cache(self) -> None:
        self.call(ResetPrefixCache())

    @rule(allow_unpaused=rarely, fails=rarely)
    def start_weight_update(self, allow_unpaused: bool, fails: bool) -> None:
        self.call(StartWeightUpdate(allow_unpaused=allow_unpaused, fails=fails))

    @rule(source=sources, part=st.integers(1, 3), of=st.integers(1, 3), fails=rarely)
    def update_weights(self, source: WeightSource, part: int, of: int, fails: bool) -> None:
        self.call(UpdateWeights(source=source, part=min(part, of), of=of, fails=fails))

    @rule(version=st.one_of(st.none(), st.sampled_from(VERSIONS)), fails=rarely)
    def finish_weight_update(self, version: str | None, fails: bool) -> None:
        self.call(FinishWeightUpdate(version=version, fails=fails))

    @rule(source=sources, version=st.one_of(st.none(), st.sampled_from(VERSIONS)), fails=rarely)
    def swap_weights(self, source: WeightSource, version: str | None, fails: bool) -> None:
        self.call(SwapWeights(source=source, version=version, fails=fails))

    @rule(version=st.sampled_from(VERSIONS), allow_unpaused=rarely)
    def update_weight_version(self, version: str, allow_unpaused: bool) -> None:
        self.call(UpdateWeightVersion(version=version, allow_unpaused=allow_unpaused))

    def teardown(self) -> None:
        if not hasattr(self, "journal"):
            return
        try:
            if self.explainer.mismatch is None:
                self._drain()
        finally:
            self.backend.stop()

    def call(self, operation: Operation) -> None:
        op, self.ops = self.ops, self.ops + 1
        called = Called(op=op, operation=to_data(operation), by="hypothesis")
        self.journal.write([called, *self.backend.apply(op, operation)])

    def _drain(self) -> None:
        """Back into service, whatever state the case left: then every request must end and nothing may be left behind."""
        if self.backend.state().update_open:
            self.call(UpdateWeights(source=WeightSource(original=True), fails=True))
        if self.backend.state().out_of_service:
            self.call(Pause(mode="keep", clear_cache=True))
            self.call(SwapWeights(source=WeightSource(original=True), version="back"))
        self.call(Resume())
        for _ in range(STEPS_TO_DRAIN):
            if not self.backend.has_work():
                break
            self.journal.write(self.backend.step())
        self.journal.write([Closed(why="drained", count=self.journal.seq)])
        violated = [judgement for judgement in self.judge.finish() if judgement.status != "holds"]
        assert not violated, self._told(f"{violated}")

    def _remember(self, entries: list[Entry]) -> None:
        self.rows += map(timeline_row, entries)

    def _compare_states(self, entries: list[Entry]) -> None:
        self.explainer.compare_state(self.backend.state())
        assert self.explainer.mismatch is None, self._told(f"{self.explainer.mismatch}")

    def _judge(self, entries: list[Entry]) -> None:
        violations = self.judge.feed(entries)
        assert not violations, self._told(f"{violations}")
        assert self.judge.replay.state() == self.backend.state(), self._told("the replayed state differs from the engine's")

    def _told(self, what: str) -> str:
        return "\n".join([what, *self.rows[-30:]])
