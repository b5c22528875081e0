"""Schedulers for vLLM's engine argument `scheduler_cls` that record what their engine core does.

    CAESURA_LOG=DIR python -m vllm.entrypoints.openai.api_server ... --scheduler-cls harness.backends.vllm.Recorder

Each is vLLM's own scheduler with a `Recording` around it, in the engine's process; nothing of vLLM is patched on disk.
What a scheduler is not told (a pause's flags and its end, weight updates, labels) comes through hooks around methods of
vLLM's engine core classes, set when this module is imported there. docs/attach.md says how it is used.
"""

# pyright: reportMissingImports=false
# vLLM is not among what lint installs.

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm.logger import init_logger
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import DPEngineCoreProc, EngineCore, EngineCoreProc
from vllm.v1.kv_cache_interface import FullAttentionSpec

from harness.backends.vllm import started
from harness.backends.vllm.install import installed
from harness.backends.vllm.recording import WEIGHT_CALLS, CannotRecord, Recording, Settings
from harness.backends.vllm.transitions import name_of
from harness.errors import BadInput
from harness.events import SCHEMA, Opened
from harness.live.handle import handle
from harness.model import Profile
from harness.scenario import EngineShape
from harness.version import version

logger = init_logger("vllm.caesura")
"""Below vLLM's own root, so that its handlers print what we say."""

DEFAULT_MIB = 256


def _called(request: Any) -> str:
    return handle(request.request_id)


class WrongScheduler(BadInput):
    """The recorder is for the other kind of scheduling."""


class Recorder(Scheduler):
    """vLLM's scheduler, recorded. With asynchronous scheduling it is AsyncRecorder that is needed.

    Raises:
        WrongScheduler: vLLM runs asynchronous scheduling.
    """

    called = staticmethod(_called)
    """What a request is called in the log."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.scheduler_config.async_scheduling:
            raise WrongScheduler(
                "harness.backends.vllm.Recorder is vLLM's Scheduler, and this engine schedules asynchronously: pass --scheduler-cls "
                "harness.backends.vllm.AsyncRecorder, or --no-async-scheduling"
            )
        self.recording = _recording(self)


class AsyncRecorder(AsyncScheduler):
    """vLLM's asynchronous scheduler, recorded.

    Raises:
        WrongScheduler: vLLM runs synchronous scheduling.
    """

    called = staticmethod(_called)
    """What a request is called in the log."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.scheduler_config.async_scheduling:
            raise WrongScheduler(
                "harness.backends.vllm.AsyncRecorder is vLLM's AsyncScheduler, and this engine schedules synchronously: pass "
                "--scheduler-cls harness.backends.vllm.Recorder, or --async-scheduling"
            )
        self.recording = _recording(self)


class LiveRecorder(Recorder):
    """For our own client, which appends a number to a request's id, since one may be used again."""

    called = staticmethod(name_of)


class LiveAsyncRecorder(AsyncRecorder):
    """The same under asynchronous scheduling."""

    called = staticmethod(name_of)


def _recording(scheduler: Any) -> Recording | None:
    """None, with a warning, where that cannot be done."""
    try:
        return _new_recording(scheduler)
    except Exception as error:  # serving comes first, whatever is wrong with us
        logger.warning("Caesura does not record this engine; serving goes on. %s: %s", type(error).__name__, error)
        return None


def _new_recording(scheduler: Any) -> Recording:
    config = scheduler.vllm_config
    if (beyond := _beyond(config, scheduler.kv_cache_config)) is not None:
        raise CannotRecord(f"{beyond}, which no log can tell of yet")
    settings = _settings(config.instance_id)
    if settings.folder is None:
        logger.info("Caesura: CAESURA_LOG is not set, so nothing is recorded until somebody asks for it.")
    return Recording(
        scheduler,
        _opened(config),
        settings,
        called=scheduler.called,
        reports_spans=installed().profile.reports_spans,
        warn=logger.warning,
    )


def _settings(instance: str) -> Settings:
    """What the environment asks for. All ranks of one deployment have one instance id, and so one folder."""
    root = os.environ.get("CAESURA_LOG")
    calls = filter(None, os.environ.get("CAESURA_WEIGHT_CALLS", "").split(","))
    return Settings(
        folder=None if not root else lambda number: Path(root) / f"vllm-{instance}-{number:03}",
        bytes=int(float(os.environ.get("CAESURA_LOG_MB", DEFAULT_MIB)) * 2**20),
        weight_calls=(*WEIGHT_CALLS, *calls),
    )


def _beyond(config: Any, kv_cache: Any) -> str | None:
    """What this engine does that a log cannot tell of, in words; None if there is nothing."""
    groups = kv_cache.kv_cache_groups
    reasons = {
        "it speculates": config.speculative_config is not None,
        "it is a pipeline of several stages": config.parallel_config.pipeline_parallel_size > 1,
        "it has a KV connector": config.kv_transfer_config is not None,
        "it serves LoRA adapters": config.lora_config is not None,
        "it pools": config.model_config.runner_type != "generate",
        "it schedules by priority": config.scheduler_config.policy != "fcfs",
        "its prefills are not chunked": not config.scheduler_config.enable_chunked_prefill,
        "its KV cache is not that of full attention in every layer": len(groups) != 1
        or type(groups[0].kv_cache_spec) is not FullAttentionSpec,
    }
    return " and ".join(reason for reason, applies in reasons.items() if applies) or None


def _opened(config: Any) -> Opened:
    import torch
    import transformers
    from vllm.platforms import current_platform

    vllm_version, profile, note = installed()
    scheduling, cache, model, parallel = config.scheduler_config, config.cache_config, config.model_config, config.parallel_config
    dtype = str(model.dtype).removeprefix("torch.")
    waves = parallel.data_parallel_size > 1 and model.is_moe
    explained_by = _in_waves(profile, scheduling) if waves else profile
    engine = {
        "checkpoint": model.model,
        "block_size": cache.block_size,
        "num_blocks": cache.num_gpu_blocks - 1,
        "max_model_len": model.max_model_len,
        "max_num_seqs": scheduling.max_num_seqs,
        "max_num_batched_tokens": scheduling.max_num_batched_tokens,
        "prefix_caching": cache.enable_prefix_caching,
        "long_prefill_token_threshold": scheduling.long_prefill_token_threshold,
        "async_scheduling": scheduling.async_scheduling,
        "device": "cpu" if current_platform.is_cpu() else "cuda",
        **({"dtype": dtype} if dtype in ("float32", "bfloat16") else {}),
    }
    return Opened(
        schema=SCHEMA,
        caesura=version(),
        backend="vllm-live",
        versions={
            "vllm": vllm_version,
            **({"note": note} if note else {}),
            "torch": str(torch.__version__),
            "transformers": transformers.__version__,
        },
        level=1 if explained_by is None else 2,
        device=f"{current_platform.get_device_name() or current_platform.device_name}, {dtype}",
        engine=engine,
        profile=(explained_by or profile).name,
        eos_token_ids=_eos_token_ids(model),
        scenario="",
        seed=0,
        clock_base_ns=0,
        rank=parallel.data_parallel_index,
    )


def _in_waves(profile: Profile, scheduling: Any) -> Profile | None:
    """What explains a rank that steps together with others; None if nothing does, as where steps counted together hold prefills back."""
    throttled = getattr(scheduling, "prefill_schedule_interval", 1) > 1
    return None if throttled else profile.in_waves


def _eos_token_ids(model: Any) -> tuple[int, ...]:
    """The tokens that end a request which says nothing of it."""
    found = [model.try_get_generation_config().get("eos_token_id"), getattr(model.hf_text_config, "eos_token_id", None)]
    lists = [ids if isinstance(ids, list) else [ids] for ids in found if ids is not None]
    return tuple(sorted({token for ids in lists for token in ids}))


# ---- hooks ----


def _hook(owner: type, name: str, hook: Any) -> None:
    """Have a recorder's hook around a method of vLLM's engine core, on cores whose scheduler is a recorder."""
    original = owner.__dict__.get(name)
    if original is None:  # this version of vLLM, or this class of it, has none of its own
        return

    @functools.wraps(original)
    def hooked(core: Any, *args: Any, **kwargs: Any) -> Any:
        recording = getattr(getattr(core, "scheduler", None), "recording", None)
        if recording is None:
            return original(core, *args, **kwargs)
        return recording.around(original, hook, core)(*args, **kwargs)

    setattr(owner, name, hooked)


def record_to(core: Any, folder: str, shape: dict[str, Any], eos_token_ids: Sequence[int]) -> None:
    """Give an idle core a new scheduler of this shape and begin a log, for somebody who reads along: a method of engine
    cores, called as vLLM's utilities are."""
    # vLLM settles its configuration once more when the engine stands, and the CPU platform switches asynchronous scheduling off in it.
    core.vllm_config.scheduler_config.async_scheduling = core.async_scheduling
    hash_function = get_hash_fn_by_name(core.vllm_config.cache_config.prefix_caching_hash_algo)
    started.configure(core, EngineShape.model_validate(shape), hash_function)
    core.scheduler.recording.begin(Path(folder), eos_token_ids=tuple(eos_token_ids))


def record_no_more(core: Any, why: str) -> None:
    """End the log that is open."""
    core.scheduler.recording.end(why)


for _owner in (EngineCore, EngineCoreProc, DPEngineCoreProc):
    _hook(_owner, "pause_scheduler", Recording.pause_scheduler)
    _hook(_owner, "resume_scheduler", Recording.resume_scheduler)
    _hook(_owner, "is_scheduler_paused", Recording.is_scheduler_paused)
    _hook(_owner, "collective_rpc", Recording.collective_rpc)
    _hook(_owner, "set_weight_version", Recording.set_weight_version)
    _hook(_owner, "_reset_caches", Recording.reset_caches)
    _hook(_owner, "shutdown", Recording.shutdown)
    _hook(_owner, "step", Recording.step)
    _hook(_owner, "step_with_batch_queue", Recording.step)
EngineCore.record_to, EngineCore.record_no_more = record_to, record_no_more  # type: ignore[attr-defined]
