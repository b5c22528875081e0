"""Tracer checkpoints: ordinary checkpoints whose tokens tell which weights and which KV entries they came from.

No framework says which weights wrote the KV entries that a token attended to, and few can be trusted about which weights
sampled it. A tracer's tokens say both, through any engine and any API (docs/tracer.md). Reading them needs no torch; making
them does, so `make_tracer` is imported when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.tracer.decode import UNTRACED, Break, CodeBook, Decoder, Mislabel, NotATracer, Share, Trace

if TYPE_CHECKING:
    from harness.tracer.checkpoint import make_tracer

__all__ = ["UNTRACED", "Break", "CodeBook", "Decoder", "Mislabel", "NotATracer", "Share", "Trace", "make_tracer"]


def __getattr__(name: str) -> Any:
    if name == "make_tracer":
        from harness.tracer.checkpoint import make_tracer

        return make_tracer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
