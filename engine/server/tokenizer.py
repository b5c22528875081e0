"""Text to token ids and back.

A checkpoint folder with a tokenizer.json is read with the `tokenizers` library. Where there
is none, a text is its UTF-8 bytes, so that a model of random weights can be asked in words too.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer as Library
from tokenizers.decoders import DecodeStream


class TextStream(Protocol):
    """Turns the tokens of one output into text as they come."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; a character whose last byte is still to come is held back."""
        ...

    def end(self) -> str:
        """What stands for the character that never came to its end."""
        ...


class Tokenizer(Protocol):
    def encode(self, text: str) -> list[int]: ...

    def stream(self) -> TextStream: ...

    def name(self, token_id: int) -> str:
        """What one token is called among log probabilities."""
        ...


def tokenizer_of(checkpoint: Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder; UTF-8 bytes where it has none."""
    path = checkpoint / "tokenizer.json"
    return FileTokenizer(path) if path.is_file() else ByteTokenizer()


class FileTokenizer:
    """A Hugging Face tokenizer.json. Special tokens are left out of the text."""

    def __init__(self, path: Path) -> None:
        self._library = Library.from_file(str(path))

    def encode(self, text: str) -> list[int]:
        return self._library.encode(text).ids

    def stream(self) -> TextStream:
        return _FileStream(self._library)

    def name(self, token_id: int) -> str:
        return self._library.decode([token_id], skip_special_tokens=False)


class _FileStream:
    def __init__(self, library: Library) -> None:
        self._library = library
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._token_ids: list[int] = []
        self._length = 0  # of the text given so far

    def feed(self, token_ids: Sequence[int]) -> str:
        self._token_ids += token_ids
        text = "".join(self._decoder.step(self._library, token_id) or "" for token_id in token_ids)
        self._length += len(text)
        return text

    def end(self) -> str:
        return self._library.decode(self._token_ids, skip_special_tokens=True)[self._length :]


class ByteTokenizer:
    """Tokens 0 to 255 are bytes; others are no text."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def stream(self) -> TextStream:
        return _ByteStream()

    def name(self, token_id: int) -> str:
        return token_name(token_id)


class _ByteStream:
    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        # A byte that UTF-8 never uses stands for every token that is no byte.
        return self._decoder.decode(bytes(token_id if token_id < 256 else 0xFF for token_id in token_ids))

    def end(self) -> str:
        return self._decoder.decode(b"", final=True)


def token_name(token_id: int) -> str:
    """A token named by its id, as vLLM does under `return_tokens_as_token_ids`."""
    return f"token_id:{token_id}"
