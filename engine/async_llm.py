"""The asyncio face of the engine, in the shape that vLLM's users know.

The core runs by itself, in a process of its own or in a thread of this one, and this object belongs to
the event loop of its first call. Every call may be cancelled; what it asked for may then happen all the same,
except that a cancelled `generate` aborts its request.
"""

from __future__ import annotations

import asyncio
import warnings
import weakref
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import replace
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any, get_args

import msgspec
import torch

from . import messages as m
from .completion import RequestOutput, RequestStream
from .config import EngineConfig, OutputKind, SamplingParams
from .connection import Buffer, Connection, ObserverFactory, ThreadConnection
from .errors import EngineDeadError, EngineError, InvalidArgument, OutOfService
from .loop import serve
from .messages import EngineCounters, TensorSpec
from .outputs import EngineCoreOutput, PauseMode
from .process import ProcessConnection
from .tensor_buffers import pack
from .weights import NamedTensors, tensors_of

CALL_NOTE: ContextVar[str] = ContextVar("CALL_NOTE", default="")
"""Goes with each call made in this context to the core's observer, which alone reads it."""

GRACE_S = 5.0
"""How long a core may take to stop when nothing is left to drain, before it is killed."""


class AsyncLLM:
    """An engine that runs by itself. Make one with `from_config`.

    Every method but `shutdown` raises EngineDeadError once the engine has stopped, was killed, or broke: those that
    wait at that moment, too.

    Attributes:
        config: what it was made of.
        eos_token_ids: end-of-sequence ids of the checkpoint.
        vocab_size: number of token ids that have an embedding.
    """

    def __init__(self, config: EngineConfig, connection: Connection) -> None:
        self.config = config
        self._connection = connection
        self._numbers = count(1)
        self._calls: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._streams: dict[str, RequestStream] = {}  # by the id of each of its sequences
        self._sequence_ids: dict[str, list[str]] = {}  # of each request that has not ended
        self._loop: asyncio.AbstractEventLoop | None = None
        self._dead: str | None = None
        # For when this object is forgotten, or the program ends.
        self._finalizer = weakref.finalize(self, _stop, connection)
        ready = connection.receive(timeout_s=None)
        if isinstance(ready, m.Stopped):
            self._finalizer()
            raise (ValueError if ready.invalid else EngineDeadError)(f"the engine did not start: {ready.why}")
        assert isinstance(ready, m.Ready), ready
        self.eos_token_ids = ready.eos_token_ids
        self.vocab_size = ready.vocab_size

    @classmethod
    def from_config(cls, config: EngineConfig, *, in_process: bool = False, observer: ObserverFactory | None = None) -> AsyncLLM:
        """Start an engine and wait until it stands.

        Args:
            config: its shape and checkpoint.
            in_process: the core gets a thread of this process, not a process of its own.
            observer: makes the observer, where the core lives.

        Raises:
            ValueError: the checkpoint is missing, or is not a decoder-only causal language model; no such observer.
            EngineDeadError: it did not start for another reason.
        """
        return cls(config, ThreadConnection(serve, config, observer) if in_process else ProcessConnection(config, observer))

    # ---- requests ----

    async def generate(
        self, prompt: Sequence[int] | Mapping[str, Sequence[int]], sampling_params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Hand a request in, and yield what it generates.

        The request is handed in by the first iteration. When the generator is closed, cancelled or forgotten before the
        end, the request is aborted, and its blocks are free.

        Args:
            prompt: token ids, or `{"prompt_token_ids": [...]}`.
            sampling_params: with `n` above 1 the sequences have the ids `0_ID`, `1_ID`, ..., and seeds that count up.
            request_id: not that of a live request.

        Yields:
            Outputs as `output_kind` says; the last one has `finished`. An aborted request ends so, too, with what it has.

        Raises:
            InvalidArgument: a request that could never run here, or an id in use.
            RequestRejected: late, under the policy `reject`.
        """
        stream = await self.add_request(request_id, prompt, sampling_params)
        try:
            finished = False
            while not finished:
                output = await stream.take()
                finished = output.finished
                yield output
        finally:
            await self._abandon(stream)

    async def add_request(
        self, request_id: str, prompt: Sequence[int] | Mapping[str, Sequence[int]], sampling_params: SamplingParams
    ) -> RequestStream:
        """Hand a request in, and return when it is accepted. Arguments and errors are those of `generate`.

        Returns:
            Its outputs, to be taken. Who takes them no more must abort the request.
        """
        token_ids = _token_ids(prompt)
        sequences = _sequences(sampling_params, request_id)
        if taken := [name for name in (request_id, *sequences) if name in self._sequence_ids or name in self._streams]:
            raise InvalidArgument(f"request {taken[0]!r} exists already; wait for its end or choose another id")
        calls = {
            name: self._call(m.Submit, request_id=name, prompt_token_ids=token_ids, params=vars(params))
            for name, params in sequences.items()
        }
        stream = RequestStream(request_id, sequences, token_ids, sampling_params.output_kind)
        self._streams.update(dict.fromkeys(sequences, stream))
        self._sequence_ids[request_id] = list(sequences)
        try:
            await self._submitted(stream, calls)
        except BaseException:
            await self._abandon(stream)
            raise
        return stream

    async def abort(self, request_ids: str | Iterable[str] | None = None) -> int:
        """End requests wherever they are; their generators yield what there is, with the reason `abort`.

        Args:
            request_ids: ids as given to `generate`, each reaching all of its sequences, or those of single sequences. None: all.

        Returns:
            How many sequences ended now. Unknown and finished ids are ignored.
        """
        if request_ids is None:
            names = None
        else:
            asked = [request_ids] if isinstance(request_ids, str) else list(request_ids)
            names = [name for request_id in asked for name in self._sequence_ids.get(request_id, [request_id])]
        return (await self._call(m.Abort, request_ids=names))["aborted"]

    # ---- pause and sleep ----

    async def pause_generation(
        self, *, mode: PauseMode = "abort", clear_cache: bool = True, wait_for_inflight_requests: bool | None = None
    ) -> None:
        """Pause; returns when the engine is quiet, and every output made before that is with its generator.

        Args:
            mode: `abort` ends every request now, `wait` runs those accepted so far to their end, `keep` freezes them.
            clear_cache: forget all KV; frozen requests are prefilled again after resume.
            wait_for_inflight_requests: deprecated; True means `mode="wait"`.

        Raises:
            InvalidArgument: unknown mode.
            PauseSuperseded: a later call overrode this one before it took effect.
            OutOfService, Conflict: `wait` for live requests, with weights that nothing may be sampled from.
        """
        if wait_for_inflight_requests is not None:
            warnings.warn('wait_for_inflight_requests is deprecated; use mode="wait"', DeprecationWarning, stacklevel=2)
            mode = "wait" if wait_for_inflight_requests else mode
        await self._call(m.Pause, mode=mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        """End the pause, superseding it if it is pending; while running, do nothing.

        Raises:
            Conflict: a weight session is open, or something is asleep.
            OutOfService: a weight update failed half-way.
        """
        await self._call(m.Resume)

    async def is_paused(self) -> bool:
        """True from the moment that a pause is taken up."""
        return (await self._call(m.IsPaused))["is_paused"]

    async def sleep(self, level: int = 1, mode: PauseMode | None = None) -> None:
        """Pause, then give memory back; returns when that is done.

        Args:
            level: 0 none, 1 moves the weights to the host and drops the KV, 2 drops both.
            mode: as of a pause; None leaves a pause that is in force as it is, and otherwise means `abort`.

        Raises:
            InvalidArgument, PauseSuperseded, OutOfService, Conflict: as for a pause; Conflict while a weight session is open.
        """
        await self._call(m.Sleep, level=level, mode=mode)

    async def wake_up(self, tags: Iterable[str] | None = None) -> bool:
        """Map the memory of `tags` (`weights`, `kv_cache`; None: all) again. Fully awake, a pause that only `sleep` made ends.

        Returns:
            Whether the engine is awake now.
        """
        return (await self._call(m.WakeUp, tags=None if tags is None else list(tags)))["status"] == "awake"

    async def is_sleeping(self) -> bool:
        """Whether anything is asleep, level 0 included."""
        return (await self._call(m.IsSleeping))["is_sleeping"]

    async def reset_prefix_cache(self) -> None:
        """Forget all KV that no request needs; while a pause is effective, frozen requests give theirs up too.

        Raises:
            CacheBusy: requests hold blocks and no pause is effective.
        """
        await self._call(m.ResetPrefixCache)

    # ---- weights ----

    async def start_weight_update(self, *, allow_unpaused: bool = False) -> None:
        """Open a weight session.

        Raises:
            Conflict: a session is open; a pause is pending; weights are asleep; not paused, without `allow_unpaused`.
            UpdateFailed: the engine could not begin; nothing changed.
        """
        await self._call(m.StartWeightUpdate, allow_unpaused=allow_unpaused)

    async def update_weights(
        self, source: str | Path | dict[str, torch.Tensor] | NamedTensors, *, part: int | None = None, of: int | None = None
    ) -> None:
        """Write new weights in place; any number of calls a session.

        Args:
            source: a folder of safetensors that the core can read, or named tensors, which must not change before this returns.
            part, of: which of how many parts, from 1; a session whose caller counts them is finished only when it has them all.

        Raises:
            Conflict: no session is open.
            InvalidArgument: no such folder, or `of` differs from that of earlier parts.
            UpdateFailed: a tensor does not fit, or could not be read. If the session has written nothing, it stays open;
                otherwise it is closed and the engine is out of service until a full update succeeds.
        """
        folder, tensors, buffers = _packed(source)
        await self._call(m.UpdateWeights, buffers, folder=folder, tensors=tensors, part=part, of=of)

    async def finish_weight_update(self, weight_version: str | None = None) -> str:
        """Close the session: tokens sampled from now on belong to `weight_version`, or to the label that was resident.

        Returns:
            The label.

        Raises:
            Conflict: no session is open; parts are missing; out of service, and some weight was not sent.
            InvalidArgument: an empty version.
            UpdateFailed: the engine could not commit; as for `update_weights`.
        """
        return (await self._call(m.FinishWeightUpdate, version=weight_version))["weight_version"]

    async def load_weights(self, source: str | Path | dict[str, torch.Tensor] | NamedTensors, weight_version: str | None = None) -> str:
        """The whole session in one: start, one part, finish. Arguments, answer and errors are those of the phases."""
        folder, tensors, buffers = _packed(source)
        return (await self._call(m.LoadWeights, buffers, folder=folder, tensors=tensors, version=weight_version))["weight_version"]

    async def update_weight_version(self, version: str, *, allow_unpaused: bool = False) -> None:
        """Set the label without touching weights.

        Raises:
            Conflict: no pause is effective, without `allow_unpaused`.
            InvalidArgument: an empty version.
        """
        await self._call(m.UpdateWeightVersion, version=version, allow_unpaused=allow_unpaused)

    async def get_weight_version(self) -> str:
        """Label of the resident weights; `default` before any update."""
        return (await self._call(m.GetWeightVersion))["weight_version"]

    async def weight_checksums(self) -> dict[str, str]:
        """A checksum of each resident weight's bytes, by name."""
        return (await self._call(m.WeightChecksums))["checksums"]

    # ---- health ----

    async def counters(self) -> EngineCounters:
        """Queues, blocks, tokens and states, as they are between two steps."""
        return msgspec.convert(await self._call(m.GetCounters), EngineCounters)

    async def check_health(self) -> None:
        """Whether the engine can serve; paused, it can.

        Raises:
            EngineDeadError: it is dead.
            OutOfService: a weight update failed half-way.
        """
        if (why := (await self.counters()).out_of_service) is not None:
            raise OutOfService(f"a weight update failed half-way ({why}); send a full update")

    @property
    def dead_error(self) -> EngineDeadError | None:
        """What every call raises now; None while the engine lives."""
        return None if self._dead is None else EngineDeadError(self._dead)

    def shutdown(self, timeout: float = 0.0) -> None:
        """Stop the engine and wait until it is gone; again, do nothing.

        Args:
            timeout: seconds that live requests get to end by themselves. Those left are aborted, and their generators say so;
                requests that come meanwhile are refused. Requests that a pause holds back are not waited for.
        """
        if self._finalizer.detach() is None:
            return
        if self._dead is None:
            self._connection.send(m.Shutdown(call=next(self._numbers), drain_s=timeout, why="shutdown was called"))
        deadline = monotonic() + timeout + GRACE_S
        while self._dead is None and (report := self._connection.receive(max(0.0, deadline - monotonic()))) is not None:
            self._take(report)
        self._connection.close(max(0.0, deadline - monotonic()))
        self._die("it did not stop in time and was killed")

    # ---- the inside ----

    def _call(self, kind: type[m.Call], buffers: Sequence[Buffer] = (), /, **arguments: Any) -> asyncio.Future[dict[str, Any]]:
        """Send a call now; the future is its answer."""
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        loop = self._bind()
        number = next(self._numbers)
        self._connection.send(m.make_call(kind, {"call": number, "note": CALL_NOTE.get(), **arguments}), buffers)
        answer: asyncio.Future[dict[str, Any]] = loop.create_future()
        self._calls[number] = answer
        return answer

    def _bind(self) -> asyncio.AbstractEventLoop:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            receive = weakref.WeakMethod(self._receive)  # a connection must not keep alive who would close it

            def arrived() -> None:
                if (method := receive()) is not None:
                    method()

            self._connection.notify(loop, arrived)
        elif self._loop is not loop:
            raise RuntimeError("this AsyncLLM belongs to the event loop of its first call; make one for each event loop")
        return loop

    def _receive(self) -> None:
        while self._dead is None and (report := self._connection.receive()) is not None:
            self._take(report)

    def _take(self, report: m.Report) -> None:
        match report:
            case m.Outputs(outputs=outputs):
                for output in outputs:
                    self._deliver(output)
            case m.Answer(call=call, answer=answer):
                if (future := self._calls.pop(call)) and not future.done():
                    future.set_result(answer)
            case m.Refusal(call=call):
                if (future := self._calls.pop(call)) and not future.done():
                    future.set_exception(report.exception())
            case m.Stopped(why=why):
                self._die(why)

    def _deliver(self, output: EngineCoreOutput) -> None:
        stream = self._streams[output.request_id]
        stream.put(output)
        if output.finish_reason is not None:
            self._forget(stream, [output.request_id])

    def _forget(self, stream: RequestStream, sequence_ids: Iterable[str]) -> None:
        """These sequences have ended, or were never accepted: their ids are free, and that of the request with the last of them."""
        for name in list(sequence_ids):
            self._streams.pop(name, None)
            stream.unfinished.pop(name, None)
        if not stream.unfinished:
            self._sequence_ids.pop(stream.request_id, None)

    def _die(self, why: str) -> None:
        if self._dead is not None:
            return
        self._dead = f"the engine has stopped: {why}"
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(self._dead))
        for stream in self._streams.values():
            stream.fail(EngineDeadError(self._dead))
        self._calls.clear()
        self._streams.clear()
        self._sequence_ids.clear()

    async def _submitted(self, stream: RequestStream, calls: Mapping[str, asyncio.Future[dict[str, Any]]]) -> None:
        """Wait until the core has taken every sequence up. Raises: EngineError, if it refused one."""
        refused: dict[str, EngineError] = {}
        for name, call in calls.items():
            # Not by `gather`, which takes turns of the event loop: a pause that is answered in the same one would be faster.
            try:
                await call
            except EngineError as error:
                refused[name] = error
        self._forget(stream, refused)
        for error in refused.values():
            raise error

    async def _abandon(self, stream: RequestStream) -> None:
        """End what nobody waits for any more. The abort is sent at once, whatever becomes of waiting for it."""
        if not stream.unfinished or self._dead is not None:
            return
        if not stream.unfinished or self._dead is not None:
            return
        aborted = self._call(m.Abort, request_ids=list(stream.unfinished))
        aborted.add_done_callback(lambda _: self._forget(stream, stream.unfinished))
        with suppress(EngineDeadError):
            await asyncio.shield(aborted)


def _token_ids(prompt: Sequence[int] | Mapping[str, Sequence[int]]) -> list[int]:
    if isinstance(prompt, Mapping) and set(prompt) == {"prompt_token_ids"}:
        prompt = prompt["prompt_token_ids"]
    if isinstance(prompt, str | bytes | Mapping) or not isinstance(prompt, Iterable):
        raise InvalidArgument(f"a prompt is token ids, or {{'prompt_token_ids': [...]}}, got {type(prompt).__name__}; tokenize text first")
    return list(prompt)


def _sequences(params: SamplingParams, request_id: str) -> dict[str, SamplingParams]:
    """The sequences of a request, by id."""
    if not isinstance(params, SamplingParams):
        raise InvalidArgument(f"sampling_params must be SamplingParams, got {type(params).__name__}")
    if not isinstance(request_id, str) or not request_id:
        raise InvalidArgument(f"a request id must be a string of at least one character, got {request_id!r}")
    if params.output_kind not in get_args(OutputKind):
        raise InvalidArgument(f"output_kind must be one of {', '.join(get_args(OutputKind))}, got {params.output_kind!r}")
    if not isinstance(params.n, int) or params.n < 1:
        raise InvalidArgument(f"n must be an integer of at least 1, got {params.n!r}")
    if params.n == 1:
        return {request_id: params}
    seeds = [None if params.seed is None else params.seed + index for index in range(params.n)]
    return {f"{index}_{request_id}": replace(params, n=1, seed=seed) for index, seed in enumerate(seeds)}


def _packed(source: str | Path | dict[str, torch.Tensor] | NamedTensors) -> tuple[str | None, tuple[TensorSpec, ...], list[Buffer]]:
    if isinstance(source, str | Path):
        return str(Path(source).absolute()), (), []
    return None, *pack(tensors_of(source))


def _stop(connection: Connection) -> None:
    """Stop an engine that nobody can ask for anything any more."""
    connection.send(m.Shutdown(call=0, drain_s=0, why="nobody uses it any more"))
    connection.close(GRACE_S)
