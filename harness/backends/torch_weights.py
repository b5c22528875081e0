"""Where our engine's new weights come from in a scenario, and whether they are what lies in its memory afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Literal

import msgspec
import torch

from engine.core import EngineCore
from engine.errors import EngineError
from engine.weights import WeightTarget, checksum, named_weights, read_safetensors
from harness import events as ev
from harness.checkpoints import ensure
from harness.errors import BadInput
from harness.operations import Spoil, WeightSource

NamedTensor = tuple[str, torch.Tensor]

MOST_NAMES = 10
"""So many of the tensors that differ or moved are named."""


class SourceBroke(Exception):
    """What a weight phase that is to fail fails with."""


class Refused(Exception):
    """A call that the adapter itself refuses: it concerns the harness's parts, which the engine does not know."""

    def __init__(self, code: ev.ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code: ev.ErrorCode = code


class FailingTarget(WeightTarget):
    """The engine's weights, with a device that fails when it is told to."""

    _fails_in: Literal["begin", "commit"] | None = None

    @contextmanager
    def failing(self, phase: Literal["begin", "commit"] | None) -> Iterator[None]:
        self._fails_in = phase
        try:
            yield
        finally:
            self._fails_in = None

    def begin(self) -> None:
        if self._fails_in == "begin":
            raise SourceBroke("told to fail")
        super().begin()

    def commit(self) -> None:
        if self._fails_in == "commit":
            raise SourceBroke("told to fail")
        super().commit()


class WeightSources:
    """Where a scenario's new weights come from, cut into parts by name."""

    def __init__(self, original: Path) -> None:
        self._original = original

    def part(self, source: WeightSource, part: int, of: int) -> Iterator[NamedTensor]:
        """Part `part` of `of` of the source's tensors, in order of their names.

        Raises:
            Refused: the source is not there, or has fewer tensors than parts.
        """
        try:
            tensors = read_safetensors(self._original if source.checkpoint is None else ensure(source.checkpoint))
        except (BadInput, EngineError) as error:
            raise Refused("invalid", f"weight source {source.checkpoint}: {error}") from error
        tensors = list(tensors)
        if of > len(tensors):
            raise Refused("invalid", f"{len(tensors)} tensors cannot be sent in {of} parts")
        wanted = range((part - 1) * len(tensors) // of, part * len(tensors) // of)
        sent = (tensors[index] for index in wanted)
        if (noise := source.perturb) is not None:
            sent = (_perturbed(*tensors[index], seed=noise.seed * len(tensors) + index, scale=noise.scale) for index in wanted)
        return sent if source.spoil is None else _spoilt(sent, source.spoil)


def _perturbed(name: str, tensor: torch.Tensor, *, seed: int, scale: float) -> NamedTensor:
    """Noise relative to the tensor's own spread, the same however the weights are cut into parts."""
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
    return name, tensor + (scale * tensor.float().std(correction=0) * noise).to(tensor.dtype)


def _spoilt(tensors: Iterable[NamedTensor], spoil: Spoil) -> Iterator[NamedTensor]:
    """The tensors, one of them bad: the one of that number, or the last sent again if there are fewer."""
    at, name, tensor = -1, "", torch.empty(0)
    for at, (name, tensor) in enumerate(tensors):
        yield _bad(name, tensor, spoil.how) if at == spoil.tensor else (name, tensor)
    if at < spoil.tensor:
        yield _bad(name, tensor, spoil.how)


def _bad(name: str, tensor: torch.Tensor, how: Literal["name", "shape", "nan", "infinity"]) -> NamedTensor:
    match how:
        case "name":
            return f"{name}.of_another_model", tensor
        case "shape":
            return name, torch.cat([tensor, tensor[:1]])
        case "nan" | "infinity":
            spoilt = tensor.clone()
            spoilt.view(-1)[-1] = torch.nan if how == "nan" else torch.inf
            return name, spoilt


def breaking(tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
    """The first tensor, then a failure."""
    yield next(iter(tensors))
    raise SourceBroke("told to fail after its first tensor")


class WeightAudit:
    """What the sender says an engine's weights should be now, against what lies in its memory.

    Args:
        core: the engine.
        original: the checkpoint that it started with.
    """

    def __init__(self, core: EngineCore, original: Path) -> None:
        self._core = core
        self._original = original
        self._sent: dict[str, str] = {}
        self._noted: dict[str, str] = {}
        self._addresses: dict[str, int] = {}

    def begin(self) -> None:
        """A session opens: from now on weights stay where they are."""
        self._addresses = _addresses(self._core)

    def note(self, tensors: Iterable[NamedTensor]) -> Iterator[NamedTensor]:
        """The tensors, each noted as it is sent."""
        self._noted = {}
        dtype = self._core.runner.model.dtype
        for name, tensor in tensors:
            self._noted[name] = contents(tensor, dtype)
            yield name, tensor

    def expect(self, noted: Mapping[str, str]) -> None:
        """What is being sent, noted by its sender: the `contents` of each tensor by name."""
        self._noted = dict(noted)

    def accept(self) -> None:
        """The engine said that it took all that was noted."""
        canonical = self._core.weight_target.canonical
        self._sent.update({canonical(name): contents for name, contents in self._noted.items()})

    def audited(self, committed: ev.Committed) -> ev.Committed:
        """The event with what was sent and what is there."""
        state = dict(named_weights(self._core.runner.model))
        resident = {name: _words(state[name], told) for name, told in self._core.weight_checksums().items()}
        sent = {name: self._sent.get(name) or self._first(name) for name in resident}
        addresses = _addresses(self._core)
        return msgspec.structs.replace(
            committed,
            sent=_digest(sent),
            resident=(_digest(resident),),
            differing=tuple(name for name in resident if sent[name] != resident[name])[:MOST_NAMES],
            moved=tuple(name for name in addresses if addresses[name] != self._addresses[name])[:MOST_NAMES],
        )

    def _first(self, name: str) -> str:
        """The contents of a weight that no update wrote."""
        return _first_contents(self._original, self._core.runner.model.dtype)[name]


@lru_cache(maxsize=8)
def _first_contents(folder: Path, dtype: torch.dtype) -> dict[str, str]:
    return {name: contents(tensor, dtype) for name, tensor in read_safetensors(folder)}


def contents(tensor: torch.Tensor, dtype: torch.dtype) -> str:
    """Shape, type and checksum of a tensor as an engine of that type keeps it."""
    tensor = tensor.to(dtype)
    return _words(tensor, checksum(tensor))


def _words(tensor: torch.Tensor, told: str) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} {told}"


def _digest(contents: dict[str, str]) -> str:
    said = "".join(f"{name} {contents[name]}\n" for name in sorted(contents))
    return blake2b(said.encode(), digest_size=16).hexdigest()


def _addresses(core: EngineCore) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in named_weights(core.runner.model)}
