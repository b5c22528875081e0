"""A weight-transfer backend of vLLM's that takes its tensors from this process.

None of vLLM's own backends runs without an accelerator. This one is registered beside them under
the name "caesura" and goes their way: a session opens with vLLM's layerwise reload, which takes the
weights off the model, and finish puts the new ones there. Who may call what when is vLLM's own worker's
business. In between, parts are kept: vLLM's loader counts tensors, and one that it is given twice breaks it.
"""

# pyright: reportMissingImports=false
# vLLM is not among what lint installs.

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from harness.backends.torch_weights import SourceBroke

NAME = "caesura"

NamedTensor = tuple[str, torch.Tensor]


class Sender:
    """The trainer's side: what the next phase sends, and whether it breaks."""

    def __init__(self) -> None:
        self.tensors: Iterable[NamedTensor] = ()
        self.fails = False
        """The phase that runs now fails; an update does so after its first tensor."""
        self.sent = 0
        self.sent_bytes = 0

    def send(self) -> Iterator[NamedTensor]:
        """The tensors of this phase, counted."""
        self.sent = self.sent_bytes = 0
        for name, tensor in self.tensors:
            self.sent += 1
            self.sent_bytes += tensor.numel() * tensor.element_size()
            yield name, tensor
            self.break_if_told()

    def break_if_told(self) -> None:
        if self.fails:
            raise SourceBroke("told to fail")


SENDER = Sender()
"""The one that every session of this process receives from: vLLM makes its receivers by itself, out of a name."""


class InProcessTransfer(WeightTransferEngine):
    """vLLM's side."""

    init_info_cls = update_info_cls = dict
    received: dict[str, torch.Tensor]
    """This session's tensors by name; of one sent twice, the last."""

    def init_transfer_engine(self, init_info: Any) -> None:
        pass

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        SENDER.break_if_told()
        self.received = {}
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.received.update(SENDER.send())

    def receive_weights(self, update_info: Any) -> None:
        raise NotImplementedError("update_weights takes the tensors itself")

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> None:
        """Asked for up to 0.27, where the class was the trainer's side too."""
        raise NotImplementedError("SENDER is the trainer's side")

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        SENDER.break_if_told()
        with torch.device(self.device):
            self.model.load_weights(self.received.items())  # type: ignore[operator]
        finalize_layerwise_reload(self.model, self.model_config)
        self.received = {}

    def shutdown(self) -> None:
        pass


class MadeUpTransfer(InProcessTransfer):
    """The same for a worker without a model: only the epoch of its made-up tokens changes."""

    def __init__(self) -> None:
        self.epoch = 0
        self._wrote = False

    def start_weight_update(self) -> None:
        SENDER.break_if_told()
        self._wrote = False

    def update_weights(self, update_info: dict[str, Any]) -> None:
        if not self._wrote:
            self._wrote = True
            self.epoch += 1
        SENDER.break_if_told()

    def finish_weight_update(self) -> None:
        SENDER.break_if_told()

    def reset_weight_update_target(self) -> None:
        pass


def register() -> None:
    """Make the backend known to vLLM; once a process."""
    if NAME not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(NAME, InProcessTransfer)
