"""Text to token ids and back, without loading an engine.

A checkpoint folder with a tokenizer.json is read with the `tokenizers` library
(it comes with the extra `engine`). A checkpoint without one, and the model by
itself, take the UTF-8 bytes of a text as its tokens: prefixes are shared as the
text shares them, and any vocabulary of 256 tokens will do.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Tokenizer(Protocol):
    def encode(self, text: str) -> tuple[int, ...]: ...

    def decode(self, tokens: tuple[int, ...]) -> str: ...


class ByteTokenizer:
    """A text's UTF-8 bytes; tokens above 255 are no text and show as numbers."""

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())

    def decode(self, tokens: tuple[int, ...]) -> str:
        return " ".join(map(str, tokens))


class FileTokenizer:
    """A Hugging Face tokenizer.json."""

    def __init__(self, path: Path) -> None:
        from tokenizers import Tokenizer as Library

        self._library = Library.from_file(str(path))

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._library.encode(text).ids)

    def decode(self, tokens: tuple[int, ...]) -> str:
        return self._library.decode(list(tokens), skip_special_tokens=False)


def tokenizer_of(checkpoint: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder; bytes where it has none or the `tokenizers` library is missing."""
    path = checkpoint / "tokenizer.json"
    if not path.is_file():
        return ByteTokenizer()
    try:
        return FileTokenizer(path)
    except ModuleNotFoundError:
        return ByteTokenizer()
