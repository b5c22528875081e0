"""A weight-transfer backend of vLLM's that reads folders, so that a weight session can be tried over HTTP without an accelerator.

It runs in the server's workers, not here: `--worker-extension-cls harness.backends.http.vllm_folders.Extension
--weight-transfer-config '{"backend": "folders"}'` has vLLM import this module in each of them, which makes the backend known.
"""

# pyright: reportMissingImports=false
# vLLM is not among what lint installs.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

NAME = "folders"


@dataclass
class InitInfo(WeightTransferInitInfo):
    backend: str = "safetensors"


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    path: str
    """A folder on the server's machine that holds safetensors files."""


class FolderTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """A session is vLLM's layerwise reload, its one part a whole folder."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        if init_info.backend != "safetensors":
            raise ValueError(f"got the format {init_info.backend!r}, expected 'safetensors'")

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        files = sorted(Path(update_info.path).glob("*.safetensors"))
        if not files:
            raise ValueError(f"no weights in {update_info.path}: expected *.safetensors")
        with torch.device(self.device):
            self.model.load_weights(_tensors(files))  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    @staticmethod
    def trainer_send_weights(*_: object, **__: object) -> None:
        """Asked for up to vLLM 0.27, where the class was the trainer's side too."""
        raise NotImplementedError("a trainer writes folders")

    def shutdown(self) -> None:
        pass


class Extension:
    """Named as `worker_extension_cls` it has the module imported; it adds nothing to the worker."""


def _tensors(files: list[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as weights:
            for name in weights.keys():  # noqa: SIM118  it is no mapping
                yield name, weights.get_tensor(name)


if NAME not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(NAME, FolderTransfer)
