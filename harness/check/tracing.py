"""A tracer on the server: found by its tokens, and read in every request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.backends import BackendError
from harness.check.request import Request
from harness.tracer import UNTRACED, CodeBook, Decoder, NotATracer, Trace

MOST_VERSIONS = 64
SHARES = (16, 8, 32)
"""How finely a tracer may tell shares, the default first: where no folder says, only stale tokens do."""


class Tracing:
    """How to read the server's tokens, and which versions may be pushed.

    Args:
        version: what the server was found with, `v1` for example.
        folders: of the versions, by name; empty if none was given.
    """

    def __init__(self, decoder: Decoder, version: str, folders: Mapping[str, Path]) -> None:
        self.decoder = decoder
        self.version = version
        self.folders = folders

    @property
    def other(self) -> str | None:
        """A version to push that is not the one which is served; None if there is no folder of one."""
        return next((version for version in self.folders if version != self.version), None)

    def trace(self, request: Request) -> Trace:
        return self.decoder.decode(request.prompt, request.tokens)


def breaks(trace: Trace) -> str:
    """The first break of a request's chain, and how many follow."""
    first, more = trace.breaks[0], len(trace.breaks) - 1
    rest = f", and {more} more" if more else ""
    return f"token {first.index}: {first.kind} ({first.count} tokens; position {first.got}, expected {first.expected}){rest}"


def find_folders(folder: Path) -> dict[str, Path]:
    """The versions v1, v2, ... in a folder that `caesura checkpoint tracer` made.

    Raises:
        BackendError: there are none; the message says what was expected.
    """
    versions = sorted((file.parent for file in folder.glob("v*/tracer.json")), key=_number)
    found = {version.name: version.resolve() for version in versions}
    if len(found) < 2:
        raise BackendError(f"{folder} has no versions of a tracer: expected OUT of `caesura checkpoint tracer OUT`: v1, v2, ...")
    return found


def recognise(prompt: Sequence[int], output: Sequence[int], folders: Mapping[str, Path]) -> Tracing | None:
    """What reads a server's tokens, if they are a tracer's: one version, nothing stale, and no break in the chain.

    Raises:
        BackendError: folders were given and the tokens are not of that tracer.
    """
    for decoder in _decoders(folders):
        try:
            trace = decoder.decode(prompt, output)
        except ValueError:  # a token that no tracer of that kind has
            continue
        versions = set(trace.versions)
        if len(versions) == 1 and UNTRACED not in versions and not trace.breaks and not trace.stale:
            return Tracing(decoder, versions.pop(), folders)
    if folders:
        raise BackendError(
            f"the server's tokens {list(output[:4])}... are none of the tracer in {next(iter(folders.values())).parent}: "
            "serve one of its folders, or leave --tracer out"
        )
    return None


def _decoders(folders: Mapping[str, Path]) -> list[Decoder]:
    if folders:
        try:
            return [Decoder.from_folder(next(iter(folders.values())))]
        except NotATracer as error:
            raise BackendError(str(error)) from error
    return [Decoder(CodeBook(versions=MOST_VERSIONS, shares=shares)) for shares in SHARES]


def _number(folder: Path) -> int:
    digits = folder.name[1:]
    return int(digits) if digits.isdigit() else 0
