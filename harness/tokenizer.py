"""Text to token ids and back, without loading an engine.

A checkpoint folder with a tokenizer.json is read with the `tokenizers` library
(it comes with the extra `engine`). Where there is none, a text prompt is its
UTF-8 bytes: prefixes are shared as the texts share them, and any vocabulary of
256 tokens will do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Tokenizer(Protocol):
    def encode(self, text: str) -> tuple[int, ...]: ...

    def decode(self, tokens: tuple[int, ...]) -> str: ...


class FileTokenizer:
    """A Hugging Face tokenizer.json."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Library

        self._library = Library.from_file(str(path))

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._library.encode(text).ids)

    def decode(self, tokens: tuple[int, ...]) -> str:
        return self._library.decode(list(tokens), skip_special_tokens=False)


def bytes_of(text: str) -> tuple[int, ...]:
    """The tokens of a text where there is no tokenizer."""
    return tuple(text.encode())


def tokenizer_of(checkpoint: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder; None where it has none or the `tokenizers` library is missing."""
    path = checkpoint / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        return FileTokenizer(path)
    except ModuleNotFoundError:
        return None
