"""Weights by name: where they are read from, and the resident ones as a place to write to.

New weights are copied into the tensors that the model already uses, so that
whatever captured their addresses (CUDA graphs, tied layers) stays right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from json import loads
from pathlib import Path
from typing import cast

import torch
from safetensors import safe_open

from .errors import InvalidArgument
from .splitmix import mixed, states

NamedTensors = Iterable[tuple[str, torch.Tensor]]

_CHECKSUM_WORDS = 1 << 18
"""Words that are summed at a time: few enough to stay in a cache, enough to keep a GPU busy."""


def read_safetensors(folder: str | Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a checkpoint folder, in order of their names, read one at a time.

    Raises:
        InvalidArgument: at once, if the folder cannot be read, or holds neither model.safetensors nor an index of shards.
    """
    try:
        return _read(_files_of(Path(folder)))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:  # a name that no file can have, an index that is none
        raise InvalidArgument(f"no weights can be read from {folder}: {error}") from error


def _files_of(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = loads(index.read_text())["weight_map"]
        return [folder / name for name in sorted(dict.fromkeys(weight_map.values()))]
    if single.is_file():
        return [single]
    raise FileNotFoundError(f"expected {single.name} or {index.name} in it")


def _read(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    with ExitStack() as stack:
        file_of = {}
        for path in files:
            file = stack.enter_context(safe_open(path, framework="pt"))
            file_of.update(dict.fromkeys(file.keys(), file))
        for name in sorted(file_of):
            yield name, file_of[name].get_tensor(name)


def named_weights(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's resident weights, in order of their names: what a full update must send. Tied tensors come once, under their first name."""
    state = model.state_dict()
    canonical = _canonical_names(state)
    return ((name, state[name]) for name in sorted(state) if canonical[name] == name)


def first_not_finite(tensors: NamedTensors) -> str | None:
    """The name of the first tensor that holds NaN or infinity."""
    return next((name for name, tensor in tensors if not tensor.isfinite().all()), None)


def checksum(tensor: torch.Tensor) -> str:
    """64 bits over a tensor's bytes in their places, as 16 hexadecimal digits; computed on its device.

    The sum of splitmix64 of each 8 bytes, keyed by their place: integers, so the sum has no order. The last bytes
    are filled up with zeros; shape and dtype are not part of it.
    """
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for first, chunk in enumerate(data.split(8 * _CHECKSUM_WORDS)):
        words = torch.zeros(-(-len(chunk) // 8), dtype=torch.int64, device=data.device)
        words.view(torch.uint8)[: len(chunk)] = chunk
        total += mixed(words + mixed(states(0, first * _CHECKSUM_WORDS + 1, len(words), data.device))).sum()
    return f"{int(total) % (1 << 64):016x}"


def tensors_of(source: str | Path | dict[str, torch.Tensor] | NamedTensors) -> NamedTensors:
    """The named tensors of a checkpoint folder, a state dict or an iterable of pairs."""
    if isinstance(source, str | Path):
        return read_safetensors(source)
    if isinstance(source, dict):
        return cast(NamedTensors, source.items())
    return source


def _canonical_names(state: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """For each name the first one that shares its storage."""
    first_name: dict[int, str] = {}
    return {name: first_name.setdefault(tensor.data_ptr(), name) for name, tensor in state.items()}


class WeightTarget:
    """The resident weights of a model, written in place: `begin`, `write` each tensor, `commit`.

    The core reaches the weights through this object alone. A subclass that raises in `begin` or `commit`,
    set as `EngineCore.weight_target`, is a device that fails there.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._tensors = model.state_dict()
        self._canonical = _canonical_names(self._tensors)
        self.names: tuple[str, ...] = tuple(name for name, _ in named_weights(model))
        """What a full update must write, sorted."""

    def begin(self) -> None:
        """Wait until nothing reads the weights any more."""
        self._synchronize()

    def resolve(self, name: str, tensor: torch.Tensor) -> str:
        """The name in `names` under which `tensor` would be written.

        Raises:
            ValueError: no such weight, another shape, an integer where a floating-point number belongs (or the reverse),
                values that are NaN or infinite, be it only in the engine's dtype, or memory that was given back.
        """
        if (resident := self._tensors.get(name)) is None:
            raise ValueError(f"no weight is called {name!r}; the {len(self.names)} names run from {self.names[0]!r} to {self.names[-1]!r}")
        if resident.numel() and not resident.untyped_storage().nbytes():
            raise ValueError(f"{name!r} is asleep: its memory was given back; wake the weights first")
        if tensor.shape != resident.shape:
            raise ValueError(f"{name!r} has shape {list(tensor.shape)}, expected {list(resident.shape)}")
        if tensor.is_complex() or tensor.is_floating_point() != resident.is_floating_point():
            raise ValueError(f"{name!r} has dtype {tensor.dtype}, which does not convert to the engine's {resident.dtype}")
        if first_not_finite([(name, tensor.to(resident.dtype))]):
            raise ValueError(f"{name!r} holds NaN or infinity as {resident.dtype}; expected finite weights")
        return self._canonical[name]

    def canonical(self, name: str) -> str:
        """The name in `names` of the weight called `name`, which is another one where weights are tied."""
        return self._canonical[name]

    def write(self, name: str, tensor: torch.Tensor) -> int:
        """Copy a tensor over the weight that `resolve` named, converting its dtype; returns the bytes written."""
        resident = self._tensors[name]
        with torch.no_grad():
            resident.copy_(tensor)
        return resident.nbytes

    def holds(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the weight has these values already, after conversion to its dtype."""
        resident = self._tensors[name]
        return torch.equal(resident, tensor.to(resident))

    def commit(self) -> None:
        """Wait until everything that was written is in place."""
        self._synchronize()

    def _synchronize(self) -> None:
        device = self._tensors[self.names[0]].device
        if device.type == "cuda":
            torch.cuda.synchronize(device)


class WeightSession:
    """One open weight update: which weights it has written so far."""

    def __init__(self, target: WeightTarget) -> None:
        self.wrote = False
        """Whether a byte was written, or may have been."""
        self._target = target
        self._written: dict[str, str] = {}  # weight -> name it was sent under

    @property
    def missing(self) -> list[str]:
        """Weights that this session has not written."""
        return [name for name in self._target.names if name not in self._written]

    def write(self, tensors: NamedTensors) -> tuple[int, int]:
        """Write tensors one by one as they come; returns how many there were and their bytes.

        Raises:
            ValueError: a tensor that does not fit, or a tied weight sent under two names with two values.
            Exception: whatever the source raises. What came before it is written.
        """
        num_tensors = num_bytes = 0
        for name, tensor in tensors:
            canonical = self._target.resolve(name, tensor)
            if (sent_as := self._written.get(canonical, name)) != name:
                if not self._target.holds(canonical, tensor):
                    raise ValueError(f"{name!r} is tied to {sent_as!r}, which was sent with other values")
                continue
            self.wrote = True
            num_bytes += self._target.write(canonical, tensor)
            num_tensors += 1
            self._written[canonical] = name
        return num_tensors, num_bytes
