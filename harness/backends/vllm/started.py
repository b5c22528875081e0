"""A vLLM engine in this process: brought up once, then given a new scheduler for each case.

Starting takes seconds, a case milliseconds. Between cases the engine is left idle, with its original
weights, and gets a new scheduler and block manager of the shape asked for, made as its own engine core
makes them: nothing of a case can reach the next one there, and the worker is checked to know no request.
"""

# pyright: reportMissingImports=false
# vLLM is not among what lint installs.

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoConfig
from vllm.config import WeightTransferConfig
from vllm.distributed.parallel_state import cleanup_dist_env_and_memory
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor.abstract import Executor
from vllm.v1.request import RequestStatus

from harness.backends import BackendError
from harness.backends.vllm import labels, weights
from harness.backends.vllm.made_up import MadeUpExecutor
from harness.scenario import EngineShape

CPU_BLOCK_SIZE, CUDA_BLOCK_SIZE = 32, 16
"""vLLM's own attention kernels take blocks of a multiple of so many tokens."""
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""What vLLM's CPU kernels were compiled for (cpu_attn.py)."""
CUDA_FLOAT32_HEAD_SIZE = 32
"""On CUDA float32 is left to Triton's kernels, whose heads have at least this size; FlashAttention takes any multiple of 8."""
GPU_MEMORY_UTILIZATION = 0.3
"""A scenario's pool is tiny: whoever else uses the device keeps most of it."""


class Kind(NamedTuple):
    """Engines of one kind differ in what their scheduler is told, and so can stand for one another."""

    checkpoint: Path
    dtype: str
    block_size: int
    """0 where there is no KV cache, and any size will do."""
    made_up: bool
    async_scheduling: bool


class Limits(NamedTuple):
    """What a worker's buffers are made for; a scheduler may be told less."""

    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int

    def cover(self, other: Limits) -> bool:
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))

    def with_(self, other: Limits) -> Limits:
        return Limits(*map(max, self, other))


class Started:
    """An engine that stands."""

    def __init__(self, kind: Kind, limits: Limits, shape: EngineShape) -> None:
        self.kind = kind
        self.limits = limits
        self.llm = _start(kind, limits, shape)
        self.core: Any = self.llm.engine_core.engine_core  # type: ignore[attr-defined]
        self._hash_function = get_hash_fn_by_name(self.core.vllm_config.cache_config.prefix_caching_hash_algo)
        init_none_hash(self._hash_function)

    @property
    def plain_attention(self) -> bool:
        return not self.kind.made_up and needs_plain_attention(self.kind)

    def configure(self, shape: EngineShape) -> Any:
        """A new scheduler for a case of this shape; returns it."""
        configure(self.core, shape, self._hash_function)
        # The front end's renderer keeps the longest prompt of the engine as it was when the first request came.
        vars(getattr(self.llm, "renderer", self)).pop("default_cmpl_tok_params", None)
        return self.core.scheduler

    def settle(self) -> None:
        """End what a case left, and tell the worker of it.

        Raises:
            AssertionError: the engine is not clean afterwards.
        """
        scheduler = self.core.scheduler
        scheduler.set_pause_state(PauseState.UNPAUSED)
        left = list(scheduler.requests)
        scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        self.llm.output_processor.abort_requests(left, internal=True)
        while scheduler.has_requests() or self.core.batch_queue:
            self.core.step_fn()
        assert not self.llm.output_processor.request_states, (
            f"vLLM's front end still knows {list(self.llm.output_processor.request_states)}"
        )
        if not self.kind.made_up:
            known = list(getattr(self.worker.model_runner, "requests", ()))
            assert not known, f"vLLM's worker still knows {known}"

    @property
    def worker(self) -> Any:
        executor = self.core.model_executor
        return executor.worker if self.kind.made_up else executor.driver_worker.worker


def configure(core: Any, shape: EngineShape, hash_function: Any) -> None:
    """Give an idle engine core a new scheduler and block manager, of this shape, made as it makes its own."""
    config, blocks = core.vllm_config, shape.num_blocks + 1
    scheduling, cache = config.scheduler_config, config.cache_config
    scheduling.max_num_seqs = shape.max_num_seqs
    scheduling.max_num_batched_tokens = scheduling.max_num_scheduled_tokens = shape.max_num_batched_tokens
    scheduling.long_prefill_token_threshold = shape.long_prefill_token_threshold
    config.model_config.max_model_len = model_len(shape)
    cache.enable_prefix_caching, cache.num_gpu_blocks, cache.block_size = shape.prefix_caching, blocks, shape.block_size
    pool = core.scheduler.kv_cache_config
    groups = [
        dataclasses.replace(group, kv_cache_spec=dataclasses.replace(group.kv_cache_spec, block_size=shape.block_size))
        for group in pool.kv_cache_groups
    ]
    assert not core.batch_queue, "a step is still in flight"
    core.scheduler = type(core.scheduler)(
        vllm_config=config,
        kv_cache_config=dataclasses.replace(pool, num_blocks=blocks, kv_cache_groups=groups),
        structured_output_manager=core.structured_output_manager,
        block_size=shape.block_size,
        hash_block_size=shape.block_size,
        log_stats=False,
    )
    core.request_block_hasher = get_request_block_hasher(shape.block_size, hash_function) if shape.prefix_caching else None
    core._weight_version = "default"


labels.keep()
_standing: Started | None = None


def started(shape: EngineShape, checkpoint: Path, *, made_up: bool) -> Started:
    """An idle engine that can be configured for the shape: the standing one if it fits, else a new one in its place.

    Raises:
        BackendError: vLLM refuses the checkpoint or the shape, or was built for another device.
    """
    global _standing
    device = "cpu" if current_platform.is_cpu() else "cuda"
    if not made_up and shape.device != device:
        raise BackendError(
            f"the scenario's engine asks for device {shape.device}, this vLLM runs on {device}: use --set engine.device={device}"
        )
    kind = Kind(checkpoint, shape.dtype, 0 if made_up else shape.block_size, made_up, shape.async_scheduling)
    limits = Limits(shape.num_blocks, model_len(shape), shape.max_num_seqs, shape.max_num_batched_tokens)
    if _standing is not None and _standing.kind == kind:
        if made_up or _standing.limits.cover(limits):
            return _standing
        limits = limits.with_(_standing.limits)
    drop()
    _standing = Started(kind, limits, shape)
    return _standing


def drop() -> None:
    """Shut the standing engine down: it died, or another one is wanted."""
    global _standing
    if _standing is not None:
        _standing.llm.engine_core.shutdown()
        _standing = None
        cleanup_dist_env_and_memory()  # the next engine measures what memory is free


def is_gone(engine: Started) -> bool:
    """Whether it was dropped, so that nothing may be asked of it any more."""
    return engine is not _standing


def model_len(shape: EngineShape) -> int:
    """The longest max_model_len up to the shape's with which vLLM starts: one request must fit into the pool."""
    return min(shape.max_model_len, shape.num_blocks * shape.block_size)


def _start(kind: Kind, limits: Limits, shape: EngineShape) -> LLMEngine:
    weights.register()
    try:
        config = EngineArgs(
            **arguments(kind, limits, shape),
            weight_transfer_config=WeightTransferConfig(backend=weights.NAME),
        ).create_engine_config()
        # The CPU platform switches it off; in one process it runs there as well.
        config.scheduler_config.async_scheduling = kind.async_scheduling
        executor = MadeUpExecutor if kind.made_up else Executor.get_class(config)
        return LLMEngine(vllm_config=config, executor_class=executor, log_stats=False, multiprocess_mode=False)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise BackendError(f"vLLM does not start with checkpoint {kind.checkpoint} and {_in_words(limits, shape)}: {reason}") from error


def arguments(kind: Kind, limits: Limits, shape: EngineShape) -> dict[str, Any]:
    """Engine arguments of every engine that is started for a shape."""
    return {
        "model": str(kind.checkpoint),
        "dtype": kind.dtype,
        "block_size": shape.block_size,
        "num_gpu_blocks_override": limits.num_blocks + 1,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "gpu_memory_utilization": GPU_MEMORY_UTILIZATION,
        "attention_backend": attention_backend(plain=not kind.made_up and needs_plain_attention(kind)),
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "async_scheduling": kind.async_scheduling,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
    }


def attention_backend(*, plain: bool) -> AttentionBackendEnum | None:
    """What to ask vLLM for; None: its own choice. The CPU platform has no choice, so there another class stands behind its one name."""
    if not current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CUSTOM, "harness.backends.vllm.attention_cuda.PlainAttentionBackend")
        return AttentionBackendEnum.CUSTOM if plain else None
    if plain:
        register_backend(AttentionBackendEnum.CPU_ATTN, "harness.backends.vllm.attention_cpu.PlainAttentionBackend")
    else:
        AttentionBackendEnum.CPU_ATTN.clear_override()
    return None


def needs_plain_attention(kind: Kind) -> bool:
    """Whether vLLM has no kernel for blocks and heads of this size."""
    config = AutoConfig.from_pretrained(kind.checkpoint)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if current_platform.is_cpu():
        return kind.block_size % CPU_BLOCK_SIZE != 0 or head_size not in CPU_HEAD_SIZES
    too_small = kind.dtype == "float32" and head_size < CUDA_FLOAT32_HEAD_SIZE
    return kind.block_size % CUDA_BLOCK_SIZE != 0 or head_size % 8 != 0 or too_small


def _in_words(limits: Limits, shape: EngineShape) -> str:
    return ", ".join([f"block_size {shape.block_size}", *(f"{name} {value}" for name, value in limits._asdict().items())])
