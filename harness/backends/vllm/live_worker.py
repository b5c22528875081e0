"""What live engines need in vLLM's worker processes, named as `worker_extension_cls`: importing this registers it there.

Weights come from files: the transfer backend "caesura-file" is told a source and reads it in the worker.
"""

# pyright: reportMissingImports=false
# vLLM is not among what lint installs.

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from harness.backends.torch_weights import WeightSources
from harness.backends.vllm import started
from harness.backends.vllm.weights import SENDER, InProcessTransfer
from harness.operations import WeightSource

NAME = "caesura-file"
PLAIN_ATTENTION = "CAESURA_PLAIN_ATTENTION"
"""Environment variable, for workers: attention of plain torch, where vLLM has no kernel for the blocks or heads."""


class FileTransfer(InProcessTransfer):
    """Reads, in the worker, the source that an update names."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        source = WeightSource.model_validate(update_info["source"])
        SENDER.tensors = WeightSources(Path(self.model_config.model)).part(source, update_info["part"], update_info["of"])
        SENDER.fails = update_info["fails"]
        try:
            super().update_weights(update_info)
        finally:
            SENDER.fails = False


class Extension:
    """What a client can call besides."""

    def fail_next_phase(self) -> None:
        """Have the next start or finish of a weight session fail."""
        SENDER.fails = True

    def forget_failure(self) -> None:
        SENDER.fails = False


def register() -> None:
    """Once a process; the front end asks for the name too."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, FileTransfer)


register()
if os.environ.get(PLAIN_ATTENTION):
    started.attention_backend(plain=True)
