"""Caesura's tool: scenarios, the model of an engine, adapters to real ones, and the verdicts.

For engines of your own, the public face is `from harness import Engine, Refused, Token, cases, hunt, operations, run`;
docs/your-engine.md goes through it. Each name is loaded when it is first asked for, so that `import harness` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness import operations
    from harness.backends.yours import Engine, Refused, Token
    from harness.fuzz.face import cases, hunt, run
    from harness.scenario import EngineShape

_FACE = {
    "Engine": "harness.backends.yours",
    "EngineShape": "harness.scenario",
    "Refused": "harness.backends.yours",
    "Token": "harness.backends.yours",
    "cases": "harness.fuzz.face",
    "hunt": "harness.fuzz.face",
    "run": "harness.fuzz.face",
}

__all__ = ["Engine", "EngineShape", "Refused", "Token", "cases", "hunt", "operations", "run"]


def __getattr__(name: str) -> Any:
    if name == "operations":
        return import_module("harness.operations")
    if name not in _FACE:
        raise AttributeError(f"module 'harness' has no attribute {name!r}")
    return getattr(import_module(_FACE[name]), name)
