"""Weight versions for a vLLM that has none (up to 0.26): kept in its engine core, where later versions have theirs, and called alike."""

# pyright: reportMissingImports=false
# vLLM is not among what lint installs.

from __future__ import annotations

from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore

HAS_LABELS = hasattr(EngineCore, "set_weight_version")


class _WithLabels(AsyncLLM):
    """What `AsyncLLM` offers from 0.27 on."""

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        await super().finish_weight_update()
        if weight_version is not None:
            await self.update_weight_version(weight_version)

    async def update_weight_version(self, new_version: str) -> None:
        await self.engine_core.call_utility_async("set_weight_version", new_version)  # type: ignore[attr-defined]

    async def get_weight_version(self) -> str:
        return await self.engine_core.call_utility_async("get_weight_version")  # type: ignore[attr-defined]


LabelledLLM: type[AsyncLLM] = AsyncLLM if HAS_LABELS else _WithLabels


def keep() -> None:
    """Have this process's engine cores keep a label, if they do not by themselves."""
    if not HAS_LABELS:
        EngineCore._weight_version = "default"
        EngineCore.set_weight_version, EngineCore.get_weight_version = _set_weight_version, _get_weight_version


def _set_weight_version(core: Any, weight_version: str) -> None:
    core._weight_version = weight_version


def _get_weight_version(core: Any) -> str:
    return core._weight_version
