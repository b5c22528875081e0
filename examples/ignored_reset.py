"""An engine that ignores a refused cache reset, as one really did (vllm-project/vllm#34382), and what Caesura says of it.

A request is frozen by `pause(keep, clear_cache=True)`. Its blocks are held, so the reset refuses; the engine does
not look at the refusal, takes the new weights, resumes, and decodes on over KV that the old weights computed.
"""

from engine.core import EngineCore
from harness.cli import main

EngineCore._clear_cache = lambda self: self._observer.cleared(success=True, empty=True)

main(["run", "scenarios/modes/keep_clear_two_requests.yaml", "--engine", "torch"])
