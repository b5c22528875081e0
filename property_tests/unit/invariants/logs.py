"""Writes event logs by hand, for tests: good ones read as a timeline, bad ones differ from them in one place.

A `Timeline` is no engine: it writes what it is told. It only spares tests the numbers that follow
from what stands above: event numbers, operation ids, step numbers, output positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, Self

from harness.events import (
    SCHEMA,
    Accepted,
    Admitted,
    Allocated,
    Asleep,
    Awake,
    Blocked,
    Called,
    Cleared,
    Closed,
    Committed,
    Delivered,
    Entry,
    ErrorCode,
    Event,
    Failure,
    Finished,
    FinishReason,
    Freed,
    Hit,
    Landed,
    Launched,
    Mode,
    Opened,
    Output,
    PartReceived,
    PauseEffective,
    PausePending,
    Received,
    Resumed,
    Returned,
    Sampled,
    Scheduled,
    Stored,
    Tag,
    UpdateStarted,
    VersionSpan,
)
from harness.invariants import judge
from harness.operations import (
    Abort,
    Level,
    Operation,
    Pause,
    Prompt,
    ResetPrefixCache,
    Resume,
    Sleep,
    Submit,
    SwapWeights,
    WakeUp,
    WeightSource,
    to_data,
)
from harness.verdict import Judgement, Violation

NEW_WEIGHTS = WeightSource(original=True)


class Timeline:
    """A log under construction; every method appends and returns the timeline."""

    def __init__(
        self,
        *,
        level: int = 2,
        num_blocks: int = 8,
        block_size: int = 4,
        max_model_len: int = 32,
        device: str = "none",
        eos: tuple[int, ...] = (),
        host_blocks: int = 0,
    ) -> None:
        self.entries: list[Entry] = []
        self._op = 0
        self._step = 0
        self._sampled: dict[str, list[int]] = {}
        self._delivered: dict[str, int] = {}
        self._prompts: dict[str, int] = {}
        engine: dict[str, Any] = {"num_blocks": num_blocks, "block_size": block_size, "max_model_len": max_model_len}
        engine["host_blocks"] = host_blocks
        self.add(
            Opened(
                schema=SCHEMA,
                caesura="0",
                backend="hand",
                versions={},
                level=level,
                device=device,
                engine=engine,
                profile="caesura",
                eos_token_ids=eos,
                scenario="",
                seed=0,
                clock_base_ns=0,
                rank=0,
            )
        )

    def add(self, *events: Event) -> Self:
        for event in events:
            seq = len(self.entries)
            self.entries.append(Entry(seq, seq * 1_000_000, "r0", event))
        return self

    # Calls.

    def take_up(self, operation: Operation, *, op: int | None = None) -> Self:
        """`called` and `received`; `op` defaults to the next number."""
        self._op = self._op + 1 if op is None else op
        return self.add(Called(op=self._op, operation=to_data(operation), by="client"), Received(op=self._op))

    def answer(self, answer: dict[str, Any] | None = None, *, op: int | None = None) -> Self:
        return self.add(Returned(op=self._op if op is None else op, answer=answer or {}, error=None))

    def refuse(self, code: ErrorCode, *, op: int | None = None) -> Self:
        return self.add(Returned(op=self._op if op is None else op, answer=None, error=Failure(code, code)))

    def submit(self, id: str, prompt: Iterable[int], *, max_tokens: int = 16, cache_salt: str | None = None, parked: bool = False) -> Self:
        tokens = tuple(prompt)
        self.take_up(Submit(id=id, prompt=Prompt(tokens=tokens), max_tokens=max_tokens, cache_salt=cache_salt))
        return self.taken_on(id, parked=parked, prompt_tokens=len(tokens)).answer({"state": "parked" if parked else "queued"})

    def taken_on(self, id: str, *, parked: bool = False, prompt_tokens: int = 1) -> Self:
        """`accepted`: in the middle of a submission."""
        self._prompts[id], self._sampled[id], self._delivered[id] = prompt_tokens, [], 0
        return self.add(Accepted(request=id, parked=parked))

    def held(self, id: str) -> Self:
        """`blocked`: in the middle of a submission."""
        return self.add(Blocked(request=id))

    def abort(self, *ids: str, head: Mapping[str, tuple[int, ...]] | None = None) -> Self:
        """Those in `head` held blocks, which go to the head of the free queue."""
        self.take_up(Abort(ids=ids))
        for id in ids:
            self.finish(id, "abort", head=(head or {}).get(id))
        outputs = tuple(Output(id, len(self._sampled[id]), (), "abort") for id in ids)
        return self.add(Delivered(outputs=outputs)).answer({"aborted": len(ids)})

    def pause(self, mode: Mode, *, clear_cache: bool = False) -> Self:
        """Taken up and pending; `effective` completes it."""
        return self.take_up(Pause(mode=mode, clear_cache=clear_cache)).add(PausePending(mode=mode, clear_cache=clear_cache))

    def cleared(self, *tiers: Literal["device", "host"]) -> Self:
        """By default the device."""
        return self.add(*(Cleared(tier=tier, success=True, empty=True) for tier in tiers or ("device",)))

    def effective(self, mode: Mode, *, clear_cache: bool = False, ops: Iterable[int] | None = None) -> Self:
        """Takes effect, and the calls `ops` return (by default the last)."""
        self.add(PauseEffective(mode=mode, clear_cache=clear_cache))
        for op in (self._op,) if ops is None else ops:
            self.answer({"status": "paused"}, op=op)
        return self

    def resume(self) -> Self:
        return self.take_up(Resume()).add(Resumed()).answer({"status": "resumed"})

    def sleep(self, level: Level = 1, mode: Mode | None = None, *, acting: Mode = "keep") -> Self:
        """Taken up and pending, in the mode `acting` if it names none; `falls_asleep` completes it."""
        clear_cache = level >= 1
        return self.take_up(Sleep(level=level, mode=mode)).add(PausePending(mode=mode or acting, clear_cache=clear_cache))

    def falls_asleep(self, level: Level = 1, mode: Mode = "keep") -> Self:
        """Its pause takes effect, memory is given back, and the last call returns."""
        self.add(PauseEffective(mode=mode, clear_cache=level >= 1))
        return self.add(Asleep(level=level, tags=("kv_cache", "weights") if level else ())).answer({"status": "sleeping"})

    def wake_up(self, *, left: tuple[Tag, ...] = (), tags: tuple[Tag, ...] | None = None, resumed: bool = False) -> Self:
        """`left`: what is still asleep then; `resumed`: it ends the pause."""
        self.take_up(WakeUp(tags=tags)).add(Awake(tags=left))
        if resumed:
            self.add(Resumed())
        return self.answer({"status": "sleeping" if left else "awake"})

    def reset(self) -> Self:
        return self.take_up(ResetPrefixCache()).cleared().answer({"status": "reset"})

    def swap(self, version: str, *, checksum: str = "") -> Self:
        """With a `checksum`, it is what was sent and what lies in memory."""
        self.take_up(SwapWeights(source=NEW_WEIGHTS, version=version))
        committed = Committed(version=version, sent=checksum, resident=(checksum,) if checksum else ())
        self.add(UpdateStarted(), PartReceived(part=1, of=1, tensors=1, bytes=4), committed)
        return self.answer({"status": "finished", "weight_version": version})

    # Scheduling.

    def admit(
        self,
        id: str,
        blocks: Iterable[int] = (),
        *,
        hit: Iterable[int] = (),
        evicted: Iterable[int] = (),
        stored: Iterable[tuple[int, int]] = (),
        life: int = 1,
        block_size: int = 4,
    ) -> Self:
        blocks, hit, stored = tuple(blocks), tuple(hit), tuple(stored)
        if hit:
            self.add(Hit(request=id, blocks=hit))
        if blocks:
            self.add(Allocated(request=id, blocks=blocks, evicted=tuple(evicted)))
        if stored:
            self.add(Stored(request=id, blocks=stored))
        return self.add(Admitted(request=id, life=life, computed=len(hit) * block_size))

    def launch(self, *rows: tuple[str, int, int]) -> Self:
        self._step += 1
        return self.add(Launched(step=self._step, batch=tuple(Scheduled(*row) for row in rows)))

    def land(self, **tokens: int) -> Self:
        for id, token in tokens.items():
            self._sampled[id].append(token)
        return self.add(Landed(step=self._step, sampled=tuple(Sampled(id, token) for id, token in tokens.items())))

    def deliver(self, **ends: FinishReason | None) -> Self:
        """Hands out what was sampled and not delivered; `ends` gives finish reasons."""
        outputs = []
        for id, tokens in self._sampled.items():
            first = self._delivered[id]
            if len(tokens) > first or id in ends:
                outputs.append(Output(id, first, tuple(tokens[first:]), ends.get(id)))
                self._delivered[id] = len(tokens)
        return self.add(Delivered(outputs=tuple(outputs)))

    def step(self, *rows: tuple[str, int, int], **tokens: int) -> Self:
        """A whole step in which nothing ends."""
        self.launch(*rows).land(**tokens)
        return self.deliver() if tokens else self

    def finish(
        self,
        id: str,
        reason: FinishReason = "length",
        *,
        spans: Iterable[tuple[str, int, int]] | None = None,
        head: tuple[int, ...] | None = None,
        tail: tuple[int, ...] = (),
    ) -> Self:
        """`finished`, by default all under the default version; then `freed` if `head` or `tail` names blocks."""
        length = len(self._sampled[id])
        if spans is None:
            spans = [("default", 0, length)] if length else []
        self.add(
            Finished(
                request=id,
                reason=reason,
                prompt_tokens=self._prompts[id],
                output_tokens=length,
                spans=tuple(VersionSpan(*span) for span in spans),
            )
        )
        return self if head is None and not tail else self.add(Freed(request=id, head=head or (), tail=tail))

    def close(self, why: str = "drained") -> Self:
        return self.add(Closed(why=why, count=len(self.entries)))

    # Verdicts.

    def last(self, kind: type[Event]) -> int:
        """Number of the last event of a kind."""
        return next(entry.seq for entry in reversed(self.entries) if isinstance(entry.event, kind))

    def judgement(self, id: str) -> Judgement:
        (judgement,) = judge(self.entries, [id])
        return judgement

    def holds(self, id: str) -> bool:
        judgement = self.judgement(id)
        assert judgement.status == "holds", judgement
        return True

    def violation(self, id: str) -> Violation:
        """The one violation of an invariant."""
        judgement = self.judgement(id)
        assert judgement.status == "violated", judgement
        assert len(judgement.violations) == 1, judgement.violations
        return judgement.violations[0]


def said(violation: Violation) -> tuple[str, str, str]:
    return violation.sentence, violation.expected, violation.got
