"""The loop of vLLM's engine process in this process, a turn at a time: `EngineCoreProc` without its sockets, tokens made up.

What it does with a message, when it steps and when a pause completes are vLLM's; only who puts messages into its queue is ours.
"""

# pyright: reportMissingImports=false
# vLLM is not among what lint installs.

from __future__ import annotations

import itertools
import queue
from typing import Any

from harness.backends.vllm.install import prepare_environment

prepare_environment()

from vllm.config import WeightTransferConfig  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType  # noqa: E402
from vllm.v1.engine.core import EngineCore, EngineCoreProc, EngineShutdownState  # noqa: E402

from harness.backends.vllm import weights  # noqa: E402
from harness.backends.vllm.made_up import MadeUpExecutor  # noqa: E402
from harness.checkpoints import ensure  # noqa: E402


class CoreProcess(EngineCoreProc):
    """Messages go into its queue and are taken up by the next `turn`, as those from a socket are."""

    def __init__(self, *, async_scheduling: bool = False, scheduler_cls: str | None = None, **shape: Any) -> None:
        weights.register()
        kind = "AsyncRecorder" if async_scheduling else "Recorder"
        config = EngineArgs(
            model=str(ensure("tiny")),
            dtype="float32",
            block_size=shape.get("block_size", 4),
            num_gpu_blocks_override=shape.get("num_blocks", 12) + 1,
            max_model_len=shape.get("max_model_len", 40),
            max_num_seqs=shape.get("max_num_seqs", 4),
            max_num_batched_tokens=shape.get("max_num_batched_tokens", 16),
            enforce_eager=True,
            skip_tokenizer_init=True,
            generation_config="vllm",
            async_scheduling=async_scheduling,
            scheduler_cls=scheduler_cls or f"harness.backends.vllm.{kind}",
            weight_transfer_config=WeightTransferConfig(backend=weights.NAME),
        ).create_engine_config()
        config.scheduler_config.async_scheduling = async_scheduling
        self.input_queue, self.output_queue = queue.Queue(), queue.Queue()
        self.engine_index = 0
        self.engines_running = self.has_coordinator = self.publish_dp_lb_stats = False
        self.process_input_queue_block = False
        self.shutdown_state = EngineShutdownState.RUNNING
        config.instance_id = shape.get("instance_id", config.instance_id)
        self._calls = itertools.count()
        EngineCore.__init__(self, config, MadeUpExecutor, log_stats=False)
        self.model_executor.scheduler = self.scheduler

    def submit(self, id: str, prompt: int = 9, max_tokens: int = 8, **params: Any) -> None:
        request = EngineCoreRequest(
            request_id=id,
            prompt_token_ids=[20 + place % 50 for place in range(prompt)],
            mm_features=None,
            sampling_params=SamplingParams(temperature=0, max_tokens=max_tokens, **params),
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.input_queue.put((EngineCoreRequestType.ADD, self.preprocess_add_request(request)))

    def abort(self, *ids: str) -> None:
        """As vLLM's socket thread does: in its turn among the other messages, and at once."""
        self.aborts_queue.put(list(ids))
        self.input_queue.put((EngineCoreRequestType.ABORT, list(ids)))

    def call(self, method: str, *args: Any) -> None:
        self.input_queue.put((EngineCoreRequestType.UTILITY, (0, next(self._calls), method, args)))

    def weights(self, method: str, **kwargs: Any) -> None:
        self.call("collective_rpc", method, None, (), kwargs)

    def turn(self) -> None:
        """Once around the loop."""
        self._process_input_queue()
        self._process_engine_step()

    def drain(self) -> None:
        while self.has_work() or not self.input_queue.empty() or self._idle_state_callbacks:
            self.turn()

    def answers(self) -> list[Any]:
        """What calls came back with since the last time: a result, or an error's text."""
        messages = [self.output_queue.get_nowait()[1] for _ in range(self.output_queue.qsize())]
        outputs = [message.utility_output for message in messages if message.utility_output is not None]
        return [output.failure_message or (output.result and output.result.result) for output in outputs]
