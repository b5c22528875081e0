"""A step's rows -> logits -> tokens, on one device: transformers' model code over the engine's paged KV cache."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from .attention import IMPLEMENTATION, KVCache, LayerProbe, LayerShape
from .config import EngineConfig
from .errors import NotFinite
from .sampler import Draw, SampledToken, sample
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
        )

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

    def execute(self, batch: Sequence[ScheduledTokens]) -> list[SampledToken]:
        """Compute a step's rows; returns a token for each share that samples, in order.

        Raises:
            NotFinite: logits hold NaN or infinity, so no token can be chosen by them.
        """
        logits = self.tiled.logits(self.kv_cache, [_rows(share) for share in batch])
        sampling = [share.request for share in batch if share.samples]
        finite = logits.isfinite().all(dim=1).tolist()
        if spoilt := [request.request_id for request, fine in zip(sampling, finite, strict=True) if not fine]:
            raise NotFinite(f"the logits of {', '.join(spoilt)} hold NaN or infinity: the resident weights cannot be sampled from")
        return sample(logits, [Draw(request.params, request.stream, request.num_tokens) for request in sampling])

    def synchronize(self) -> None:
        """Wait until the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _rows(share: ScheduledTokens) -> Rows:
    request, first, num_tokens = share
    return Rows(request.token_ids[first : first + num_tokens], first, request.blocks, num_logits=int(share.samples))


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
    return model.to(device).eval().requires_grad_(False)


def _check_architecture(model_config: PretrainedConfig, config: EngineConfig) -> None:
    architectures = model_config.architectures or []
    causal = any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures)
    if not causal or model_config.is_encoder_decoder:
        named = ", ".join(architectures) or f"a {model_config.model_type} without architecture"
        raise ValueError(f"{config.checkpoint} holds {named}; expected a decoder-only causal language model, such as LlamaForCausalLM")
    positions = getattr(model_config, "max_position_embeddings", None)
    if positions is not None and config.max_model_len > positions:
        raise ValueError(f"max_model_len ({config.max_model_len}) exceeds the {positions} positions of the model in {config.checkpoint}")
