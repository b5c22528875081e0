"""Real vLLM in lockstep, driven in process and observed from outside: nothing of it is patched on disk.

`install` says which vLLM is there, `started` brings it up and reconfigures it, `transitions` turns
what its scheduler and block manager do into events, `lockstep` is the backend. `made_up` puts
tokens in the place of the forward pass, `attention` lets the CPU have small blocks, `weights` is a
weight-transfer backend that takes tensors from this process.
"""
