"""The entries of a timeline beside a workload: each chain of them is a process that waits for its trigger.

Unlike in lockstep an entry fires at its time and not at the next step boundary, and of two chains that are due at
one instant either may be first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.execute import Chain, Facts, chains_of
from harness.operations import Operation, Submit, in_words
from harness.scenario import TimelineEntry
from harness.simulation.engine import VirtualEngine
from harness.simulation.environment import Environment, Process
from harness.tokenizer import bytes_of

BY = "timeline"


class TimelineProcesses:
    """Calls that are not waited for: a pause may be pending while later entries fire."""

    def __init__(self, env: Environment, engine: VirtualEngine, entries: Sequence[TimelineEntry], facts: Facts) -> None:
        self._env = env
        self._engine = engine
        self._facts = facts
        self._chains = chains_of(entries)

    def start(self) -> None:
        for chain in self._chains:
            self._env.process(self._run(chain))

    def unfired(self) -> Iterator[str]:
        """Entries whose trigger never was true, in words."""
        for chain in self._chains:
            for entry in chain.rest:
                yield f"line {entry.line}: {in_words(entry.operation)}"

    def _run(self, chain: Chain) -> Process:
        while (due_ns := chain.due_ns(self._facts)) is None or due_ns > self._env.now_ns:
            yield self._engine.told.wait() if due_ns is None else self._env.timeout(due_ns - self._env.now_ns)
        for entry in chain.rest:
            chain.position += 1
            if entry.name is not None:
                self._facts.name_call(self._engine.next_op, entry.name, self._env.now_ns)
            self._engine.call(_with_token_ids(entry.operation), BY)


def _with_token_ids(operation: Operation) -> Operation:
    """A text is its UTF-8 bytes, as for the model in lockstep."""
    if not isinstance(operation, Submit) or operation.prompt.token_ids is not None:
        return operation
    tokens = bytes_of(operation.prompt.text or "")
    return operation.model_copy(update={"prompt": operation.prompt.model_copy(update={"tokens": tokens})})
