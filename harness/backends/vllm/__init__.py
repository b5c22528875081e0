"""Real vLLM in lockstep, driven in process and observed from outside: nothing of it is patched on disk.

`install` says which vLLM is there, `started` brings it up and reconfigures it, `transitions` turns
what its scheduler and block manager do into events, `lockstep` is the backend. `made_up` puts
tokens in the place of the forward pass, `attention` and its two sides for CPU and CUDA allow small blocks, `weights` is a
weight-transfer backend that takes tensors from this process.

Live, `recorder` has vLLM's schedulers with a `recording` around them, for anyone's server.
"""

from __future__ import annotations

from typing import Any

_RECORDERS = ("AsyncRecorder", "Recorder")


def __getattr__(name: str) -> Any:
    """The recorders are subclasses of vLLM's: it is imported when one is asked for."""
    if name not in _RECORDERS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from harness.backends.vllm import recorder

    return getattr(recorder, name)
