"""What AsyncLLM.generate yields: the outputs of the core, put together as a request's caller wants them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .config import OutputKind
from .errors import EngineError
from .outputs import EngineCoreOutput, FinishReason, TokenLogprobs, VersionSpan


@dataclass(frozen=True, kw_only=True)
class CompletionOutput:
    """One generated sequence, or what is new of it."""

    index: int
    """Which of the request's `n` sequences."""
    token_ids: list[int]
    """All generated tokens so far; those since the last output if `output_kind` is `delta`."""
    logprobs: list[TokenLogprobs] | None
    """One for each of these tokens; None unless asked for."""
    finish_reason: FinishReason | None
    """None while the sequence goes on."""
    weight_versions: list[VersionSpan] | None
    """Half-open spans that partition the whole sequence by the weights that sampled it; None while it goes on."""


@dataclass(frozen=True, kw_only=True)
class RequestOutput:
    """News of a request. The last one has `finished`."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """The sequences that have news, in order of their index; all of them if `output_kind` is `final_only`."""
    finished: bool
    """Every sequence has ended."""


@dataclass
class _Sequence:
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    weight_versions: list[VersionSpan] | None = None
    num_seen: int = 0
    """How many of its tokens the caller has."""

    def add(self, output: EngineCoreOutput) -> None:
        assert output.first == len(self.token_ids), f"output {output} after {len(self.token_ids)} tokens: some were lost or doubled"
        self.token_ids.extend(output.token_ids)
        if output.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *output.logprobs]
        if output.finish_reason is not None:
            self.finish_reason = output.finish_reason
            self.weight_versions = list(output.weight_versions or ())

    def output(self, index: int, *, delta: bool) -> CompletionOutput:
        first = self.num_seen if delta else 0
        self.num_seen = len(self.token_ids)
        return CompletionOutput(
            index=index,
            token_ids=self.token_ids[first:],
            logprobs=None if self.logprobs is None else self.logprobs[first:],
            finish_reason=self.finish_reason,
            weight_versions=self.weight_versions,
        )


class RequestStream:
    """The outputs of one generate() call on the way from the connection to its caller.

    Args:
        request_id: the request's own.
        sequence_ids: the ids of its sequences in the core, by index.
    """

    def __init__(self, request_id: str, sequence_ids: Iterable[str], prompt_token_ids: Sequence[int], kind: OutputKind) -> None:
        self.request_id = request_id
        self._sequences = {sequence_id: _Sequence() for sequence_id in sequence_ids}
        self.unfinished = dict.fromkeys(self._sequences)
        """The sequences that have not ended, as far as it is known here."""
        self._prompt_token_ids = list(prompt_token_ids)
        self._kind = kind
        self._news: dict[str, None] = {}  # sequences with outputs that the caller has not seen
        self._error: EngineError | None = None
        self._arrived = asyncio.Event()

    def put(self, output: EngineCoreOutput) -> None:
        self._sequences[output.request_id].add(output)
        self._news[output.request_id] = None
        if output.finish_reason is not None:
            del self.unfinished[output.request_id]
        if self._kind != "final_only" or not self.unfinished:
            self._arrived.set()

    def fail(self, error: EngineError) -> None:
        self._error = error
        self._arrived.set()

    @property
    def ready(self) -> bool:
        """Whether `take` would return, or raise, at once."""
        return self._arrived.is_set()

    async def take(self) -> RequestOutput:
        """Everything that is new, at least something.

        Raises:
            EngineError: as given to `fail`, once all outputs before it were taken.
        """
        await self._arrived.wait()
        self._arrived.clear()
        if self._error is not None:
            self._arrived.set()
            if not self._news or self._kind == "final_only":
                raise self._error
        news, self._news = self._news, {}
        outputs = [
            sequence.output(index, delta=self._kind == "delta")
            for index, (sequence_id, sequence) in enumerate(self._sequences.items())
            if sequence_id in news
        ]
        return RequestOutput(
            request_id=self.request_id,
            prompt_token_ids=self._prompt_token_ids,
            outputs=outputs,
            finished=not self.unfinished,
        )
