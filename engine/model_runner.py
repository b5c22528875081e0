"""A step's rows -> logits -> tokens, on one device: transformers' model code over the engine's paged KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from .attention import IMPLEMENTATION, Chunk, KVCache, LayerProbe, LayerShape, PagedKV, PagedStep
from .config import EngineConfig
from .scheduler import ScheduledTokens


class ModelRunner:
    """A model with its weights and KV cache.

    Raises:
        ValueError: the folder is missing, or holds no decoder-only causal language model that this engine can serve.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._block_size = config.block_size
        self.device = torch.device(config.device)
        self.model = load_model(config, self.device)
        layers = self._probe(config)
        num_slots = config.num_blocks * config.block_size
        self.kv_cache = KVCache(layers, num_slots=num_slots, dtype=self.model.dtype, device=self.device)

    @property
    def vocab_size(self) -> int:
        """Number of token ids that have an embedding."""
        embedding = self.model.get_input_embeddings()
        assert isinstance(embedding, torch.nn.Embedding), embedding
        return embedding.num_embeddings

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

    @torch.inference_mode()
    def execute(self, batch: Sequence[ScheduledTokens]) -> list[int]:
        """Run one forward pass over a step's rows; returns the greedy token of each share that samples, in order.

        All rows go through the model as one sequence; only rows that sample go through its head.
        """
        chunks = [Chunk(first, first + num_tokens, request.blocks) for request, first, num_tokens in batch]
        token_ids: list[int] = []
        positions: list[int] = []
        sampling_rows: list[int] = []
        for share, chunk in zip(batch, chunks, strict=True):
            token_ids += share.request.token_ids[chunk.first : chunk.end]
            positions += range(chunk.first, chunk.end)
            if share.samples:
                sampling_rows.append(len(token_ids) - 1)
        step = PagedStep(self.kv_cache, chunks, block_size=self._block_size, device=self.device)
        logits = self._forward(token_ids, positions, sampling_rows, step)
        return logits.argmax(dim=-1).tolist()

    def synchronize(self) -> None:
        """Wait until the device has nothing left to do."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _forward(self, token_ids: list[int], positions: list[int], sampling_rows: list[int], paged: PagedKV) -> torch.Tensor:
        """Logits of the sampling rows: [len(sampling_rows), vocabulary]."""
        inputs = torch.tensor([token_ids, positions], device=self.device)
        rows = torch.tensor(sampling_rows, dtype=torch.int64, device=self.device)
        output = self.model(input_ids=inputs[:1], position_ids=inputs[1:], use_cache=False, logits_to_keep=rows, paged=paged)
        return output.logits[0]

    @torch.inference_mode()
    def _probe(self, config: EngineConfig) -> dict[int, LayerShape]:
        """The KV shapes of all layers, learned from a pass over one token."""
        probe = LayerProbe(config.max_model_len)
        try:
            self._forward([0], [0], [0], probe)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"this engine cannot serve the {type(self.model).__name__} in {config.checkpoint}: {error}") from error
        if len(probe.layers) != (expected := self.model.config.num_hidden_layers):
            raise ValueError(
                f"this engine cannot serve the {type(self.model).__name__} in {config.checkpoint}: "
                f"{len(probe.layers)} of its {expected} layers attend through transformers' attention interface"
            )
        return probe.layers


def load_model(config: EngineConfig, device: torch.device) -> PreTrainedModel:
    """Load a checkpoint for paged attention, in evaluation mode and without gradients.

    Raises:
        ValueError: no such folder; no decoder-only causal language model; weights missing; max_model_len beyond its positions.
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
