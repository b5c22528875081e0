"""An executor for vLLM that makes tokens up: its real scheduler and block manager at thousands of steps a second.

vLLM takes executors from outside. This one has no model, no weights and no KV cache; a token is a
function of the request, its position and the weights' epoch, so that one that is lost, doubled,
shifted or sampled by other weights shows.
"""

# pyright: reportMissingImports=false
# vLLM is not among what lint installs.

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from harness.backends.vllm.transitions import name_of
from harness.backends.vllm.weights import MadeUpTransfer
from harness.model.symbolic import symbolic_token

MEMORY = 1 << 40
"""Bytes that the worker says it has for its KV cache: more than any scenario asks for."""


class MadeUpWorker(Worker):
    """What is left of a worker without a device: vLLM's own rules of weight sessions."""

    def __init__(self, vllm_config: VllmConfig) -> None:
        self.vllm_config = vllm_config
        self.weight_transfer_engine = self.transfer = MadeUpTransfer()
        self._weight_update_active = self._weight_update_is_draft = False
        self.model_runner = SimpleNamespace(reset_lora_state=lambda: None)  # type: ignore[assignment]

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        size = self.vllm_config.cache_config.block_size
        return {"layer": FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)}

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def determine_available_memory(self) -> int:
        return MEMORY

    def get_supported_kv_cache_layouts(self) -> list[str]:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        return [layout.name for layout in CPUAttentionBackend.supported_kv_cache_layouts()]


class MadeUpExecutor(Executor):
    """`scheduler` and `seed` are set once the engine stands."""

    scheduler: Any
    seed = 0

    def _init_executor(self) -> None:
        self.worker = MadeUpWorker(self.vllm_config)

    def collective_rpc(self, method: str | Callable[..., Any], timeout: float | None = None, args=(), kwargs=None, **_: Any) -> Any:
        """What concerns the control plane; a device that is not there has nothing to initialise, warm up or synchronise."""
        if callable(method):
            return [method(self.worker, *args, **(kwargs or {}))]
        if method in ANSWERED:
            return [getattr(self.worker, method)(*args, **(kwargs or {}))]
        return []

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """The forward pass; as vLLM's runners do it, its tokens are left to `sample_tokens`, and a step without any ends here."""
        self._sampled = self._sample(scheduler_output.num_scheduled_tokens)
        output = None if scheduler_output.num_scheduled_tokens else self._sampled
        return _done(output) if non_block else output

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return _done(self._sampled) if non_block else self._sampled

    def _sample(self, scheduled: dict[str, int]) -> ModelRunnerOutput:
        """A token for each request that has all its tokens computed, those in flight included; a partial prefill gets none."""
        epoch, requests = self.worker.transfer.epoch, self.scheduler.requests
        ids = list(scheduled)
        sampled = []
        for request_id in ids:
            request = requests[request_id]
            token = symbolic_token(name_of(request), request.num_computed_tokens, epoch, self.seed)
            sampled.append([] if request.is_prefill_chunk else [token])
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: index for index, request_id in enumerate(ids)},
            sampled_token_ids=sampled,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
        )

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        pass


def _done(output: ModelRunnerOutput | None) -> Future[ModelRunnerOutput | None]:
    future: Future[ModelRunnerOutput | None] = Future()
    future.set_result(output)
    return future


ANSWERED = {
    "get_kv_cache_spec",
    "determine_available_memory",
    "get_supported_tasks",
    "get_supported_kv_cache_layouts",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
}
"""Calls that the worker answers."""
