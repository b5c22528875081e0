"""Rollouts and the clients that ask for them: arrivals, and what a client does whose rollout was aborted.

What a workload asks for is drawn before anything runs, rollout by rollout: under every pause mode, cache policy
and order of simultaneous events it is the same work.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.operations import Prompt, Submit
from harness.scenario import EngineShape, Workload
from harness.simulation.engine import VirtualEngine
from harness.simulation.environment import Environment, Process
from harness.simulation.ledger import Ledger
from harness.simulation.streams import gap_ns, length, stream


class Rollout(NamedTuple):
    """One sample of a prompt."""

    name: str
    prompt: Prompt
    tokens: int
    """Tokens that it generates."""


def rollouts_of(workload: Workload, shape: EngineShape, seed: int) -> list[Rollout]:
    """The rollouts in the order in which they are handed in. Lengths are cut to what a request of this engine can hold."""
    longest = min(shape.max_model_len, shape.num_blocks * shape.block_size)
    prompts, outputs = stream(seed, "prompts"), stream(seed, "outputs")
    rollouts: list[Rollout] = []
    for number in range(-(-workload.rollouts // workload.samples)):
        prompt = Prompt(tokens=min(length(prompts, workload.prompt), longest - 1), seed=number)
        for sample in range(workload.samples):
            tokens = min(length(outputs, workload.output), longest - len(prompt.token_ids or ()))
            rollouts.append(Rollout(f"p{number}.s{sample}", prompt, tokens))
    return rollouts[: workload.rollouts]


class Clients:
    """Everyone who asks for rollouts."""

    def __init__(self, env: Environment, engine: VirtualEngine, ledger: Ledger, workload: Workload, rollouts: Sequence[Rollout]) -> None:
        self.unfinished = len(rollouts)
        self._env = env
        self._engine = engine
        self._ledger = ledger
        self._workload = workload
        self._handed_in = 0
        self._next = iter(rollouts)
        self._retry_ns = round(workload.retry_ms * 1e6)

    def start(self, seed: int) -> None:
        """Begin the processes that the workload's arrivals ask for."""
        arrivals = self._workload.arrivals
        if arrivals.per_s is not None:
            self._env.process(self._arrive(arrivals.per_s, seed))
            return
        for number in range(min(arrivals.workers or 0, self.unfinished)):
            self._env.process(self._work(f"worker-{number}"))

    def _work(self, name: str) -> Process:
        """A worker of a closed loop: its next rollout is the first that nobody has."""
        for rollout in self._next:
            yield from self._generate(rollout, by=name)

    def _arrive(self, per_s: float, seed: int) -> Process:
        draws = stream(seed, "arrivals")
        for rollout in self._next:
            yield self._env.timeout(gap_ns(draws, per_s))
            self._env.process(self._generate(rollout, by="client"))

    def _generate(self, rollout: Rollout, by: str) -> Process:
        """One rollout from its start to its end, in as many requests as it takes."""
        while not self._ledger.admits(self._handed_in):
            yield self._engine.committed.wait()
        self._handed_in += 1
        prompt, left, attempt = rollout.prompt, rollout.tokens, 0
        while True:
            salt = f"version-{self._ledger.version}" if self._workload.salt_by_version else None
            submit = Submit(id=f"{rollout.name}.{attempt}", prompt=prompt, max_tokens=left, cache_salt=salt)
            attempt += 1
            stream = self._engine.submit(submit, by)
            if stream is None:
                yield from self._poll()
                continue
            if (yield stream.ended) != "abort":
                break
            if self._workload.aborted == "continue" and stream.tokens:
                prompt = Prompt(tokens=(*(prompt.token_ids or ()), *stream.tokens))
                left -= len(stream.tokens)
            yield self._env.timeout(self._retry_ns)
        self.unfinished -= 1

    def _poll(self) -> Process:
        """Until the first try after the engine has resumed; tries before it would be rejected alike and are left out."""
        since_ns = self._env.now_ns
        yield self._engine.resumed.wait()
        waited_ns = self._env.now_ns - since_ns
        yield self._env.timeout(-waited_ns % self._retry_ns if self._retry_ns else 0)
