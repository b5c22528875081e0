"""A step's rows -> logits -> tokens, on one device: transformers' model code over the engine's paged KV cache."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from .attention import IMPLEMENTATION, KVCache, LayerProbe, LayerShape
from .config import EngineConfig
from .device import HostCopy, to_device
from .errors import MemoryAsleep, NotFinite
from .host_tier import BlockCopy
from .memory import NOT_A_NUMBER, Memory
from .outputs import Tag
from .request import Request
from .sampler import Draw, SampledCopy, SampledRows, SampledToken, sample
from .scheduler import ScheduledTokens
from .tiles import Rows, TiledModel
from .weights import first_not_finite, named_weights


class ModelRunner:
    """A model with its weights and KV cache.

    Raises:
        ValueError: the folder is missing, or holds no decoder-only causal language model that this engine can serve.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.device = torch.device(config.device)
        self.model = load_model(config, self.device)
        self.tiled = TiledModel(self.model, self.device)
        self.kv_cache = KVCache(
            probe_layers(self.tiled, config),
            num_blocks=config.num_blocks,
            block_size=config.block_size,
            dtype=self.model.dtype,
            device=self.device,
            host_blocks=config.host_blocks,
        )
        self.memory: dict[Tag, Memory] = {
            "kv_cache": Memory(self.kv_cache.tensors, fill=0),
            "weights": Memory(self.model.state_dict().values(), fill=NOT_A_NUMBER),
        }
        """What can be given back while the engine sleeps. Level 2 leaves buffers that no checkpoint holds where they are."""
        self._in_flight = InFlight({}, torch.empty(0, dtype=torch.int64))

    @property
    def vocab_size(self) -> int:
        """Number of token ids that have an embedding."""
        return self.tiled.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence ids of generation_config.json, or else of config.json."""
        generation = self.model.generation_config
        ids = generation.eos_token_id if generation is not None else None
        if ids is None:
            ids = getattr(self.model.config, "eos_token_id", None)
        if ids is None:
            return ()
        return (ids,) if isinstance(ids, int) else tuple(ids)

    def launch(self, batch: Sequence[ScheduledTokens], copies: Sequence[BlockCopy] = ()) -> Flight:
        """Start computing a step's rows: on CUDA this returns before the device is done, on the CPU after.

        A token that the step before has in flight becomes input on the device, without anybody waiting for it.

        Args:
            batch: as scheduled.
            copies: what is to be copied between the tiers before.

        Raises:
            MemoryAsleep: memory that the pass needs was given back.
        """
        if asleep := [tag for tag, memory in self.memory.items() if not memory.is_mapped]:
            raise MemoryAsleep(f"a forward pass while {' and '.join(asleep)} sleep; wake them first")
        self.kv_cache.copy_blocks(copies)
        rows = [Rows(share.num_tokens, share.first, share.request.blocks, num_logits=int(share.samples)) for share in batch]
        logits = self.tiled.logits(self.kv_cache, self._token_ids(batch), rows)
        sampling = [share for share in batch if share.samples]
        sampled = sample(logits, [Draw(share.request.params, share.request.stream, share.end) for share in sampling])
        self._in_flight = InFlight({share.request: place for place, share in enumerate(sampling)}, sampled.token_ids)
        return Flight([share.request.request_id for share in sampling], logits, sampled)

    def _token_ids(self, batch: Sequence[ScheduledTokens]) -> torch.Tensor:
        """The step's tokens, on the device: int64 [tokens]. At most one of a request is in flight, and it is the last."""
        token_ids: list[int] = []
        unknown, places = [], []
        for request, first, num_tokens, _, _ in batch:
            known = request.token_ids[first : first + num_tokens]
            token_ids += known
            if len(known) < num_tokens:
                assert len(known) == num_tokens - 1, request
                unknown.append(len(token_ids))
                places.append(self._in_flight.places[request])
                token_ids.append(0)
        on_device = to_device(token_ids, self.device)
        if unknown:
            in_flight = self._in_flight.token_ids.index_select(0, to_device(places, self.device))
            on_device.index_copy_(0, to_device(unknown, self.device), in_flight)
        return on_device

    def synchronize(self) -> None:
        """Wait until the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class InFlight(NamedTuple):
    """What the last launched step samples."""

    places: dict[Request, int]
    """Where a request's token stands in `token_ids`."""
    token_ids: torch.Tensor
    """int64 [requests that sample], on the device."""


class Flight:
    """A launched step, whose tokens are on their way to the host."""

    def __init__(self, request_ids: Sequence[str], logits: torch.Tensor, sampled: SampledRows) -> None:
        self._request_ids = request_ids
        self._finite = HostCopy(logits.isfinite().all(dim=1))
        self._sampled: SampledCopy = sampled.to_host()

    def wait(self) -> list[SampledToken]:
        """The tokens of the shares that sample, in order; waits for this step, and for none launched after it.

        Raises:
            NotFinite: logits hold NaN or infinity, so no token can be chosen by them.
        """
        finite = self._finite.wait().tolist()
        if spoilt := [request_id for request_id, fine in zip(self._request_ids, finite, strict=True) if not fine]:
            raise NotFinite(f"the logits of {', '.join(spoilt)} hold NaN or infinity: the resident weights cannot be sampled from")
        return self._sampled.wait()


def probe_layers(tiled: TiledModel, config: EngineConfig) -> dict[int, LayerShape]:
    """The KV shapes of all layers, learned from one pass; warns if bits depend on a row's place in it.

    Raises:
        ValueError: a model that this engine cannot serve.
    """
    probe = LayerProbe(config.max_model_len)
    model = tiled.model
    try:
        rows_differ = tiled.rows_differ(probe)
    except (AttributeError, TypeError, ValueError) as error:
        raise ValueError(f"this engine cannot serve the {type(model).__name__} in {config.checkpoint}: {error}") from error
    if len(probe.layers) != (expected := model.config.num_hidden_layers):
        raise ValueError(
            f"this engine cannot serve the {type(model).__name__} in {config.checkpoint}: "
            f"{len(probe.layers)} of its {expected} layers attend through transformers' attention interface"
        )
    if rows_differ:
        warnings.warn(
            f"{type(model).__name__} on {tiled.device} with {torch.get_num_threads()} threads gives equal rows of one pass different bits: "
            "tokens may depend on the batch here, and golden checks may fail (docs/numerics.md)",
            RuntimeWarning,
            stacklevel=2,
        )
    return probe.layers


def load_model(config: EngineConfig, device: torch.device) -> PreTrainedModel:
    """Load a checkpoint for paged attention, in evaluation mode and without gradients.

    Raises:
        ValueError: no such folder; no decoder-only causal language model; weights missing, or holding NaN or infinity;
            max_model_len beyond its positions.
    """
    folder = Path(config.checkpoint)
    if not (folder / "config.json").is_file():
        raise ValueError(f"no checkpoint in {folder}: expected a folder with config.json and safetensors")
    model_config = AutoConfig.from_pretrained(folder, local_files_only=True)
    _check_architecture(model_config, config)
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=model_config,
            dtype=getattr(torch, config.dtype),
            attn_implementation=IMPLEMENTATION,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"the checkpoint in {folder} does not load: {error}") from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        # transformers would go on with random numbers in their place.
        raise ValueError(f"the checkpoint in {folder} lacks {len(missing)} weights, the first of them {missing[0]!r}")
    if spoilt := first_not_finite(named_weights(model)):
        raise ValueError(f"the checkpoint in {folder} holds NaN or infinity in {spoilt!r} as {config.dtype}; expected finite weights")
    return _in_own_memory(model.to(device)).eval().requires_grad_(False)


def _in_own_memory(model: PreTrainedModel) -> PreTrainedModel:
    """Weights that lie in the mapped file of the checkpoint move to memory that can be given back."""
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()
    return model


def _check_architecture(model_config: PretrainedConfig, config: EngineConfig) -> None:
    architectures = model_config.architectures or []
    causal = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures)
    if not causal or model_config.is_encoder_decoder:
        named = ", ".join(architectures) or f"a {model_config.model_type} without architecture"
        raise ValueError(f"{config.checkpoint} holds {named}; expected a decoder-only causal language model, such as LlamaForCausalLM")
    positions = getattr(model_config, "max_position_embeddings", None)
    if positions is not None and config.max_model_len > positions:
        raise ValueError(f"max_model_len ({config.max_model_len}) exceeds the {positions} positions of the model in {config.checkpoint}")
