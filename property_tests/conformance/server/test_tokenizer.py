"""Text as it comes is text as a whole: characters of several tokens, special tokens, an output that ends in mid-character."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, pre_tokenizers

from engine.server.tokenizer import ByteTokenizer, FileTokenizer, Tokenizer, tokenizer_of


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder with a tokenizer whose tokens are bytes, as GPT-2's are where it knows no word, and one special token."""
    library = Library(models.BPE(vocab={letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(["<end>"])
    folder = tmp_path_factory.mktemp("checkpoint")
    library.save(str(folder / "tokenizer.json"))
    return folder


def read(tokenizer: Tokenizer, token_ids: list[int], size: int) -> str:
    """The text of tokens that come `size` at a time."""
    stream = tokenizer.stream()
    pieces = [stream.feed(token_ids[first : first + size]) for first in range(0, len(token_ids), size)]
    return "".join(pieces) + stream.end()


def test_the_folder_decides(folder: Path, tmp_path: Path):
    assert isinstance(tokenizer_of(folder), FileTokenizer)
    assert isinstance(tokenizer_of(tmp_path), ByteTokenizer)


@given(text=st.text(), size=st.integers(1, 5))
def test_a_text_comes_back_however_its_tokens_arrive(folder: Path, text: str, size: int):
    for tokenizer in (tokenizer_of(folder), ByteTokenizer()):
        assert read(tokenizer, tokenizer.encode(text), size) == text


@pytest.mark.parametrize("size", [1, 9])
def test_half_a_character_at_the_end_is_one_replacement_and_none_before_it(folder: Path, size: int):
    for tokenizer in (tokenizer_of(folder), ByteTokenizer()):
        assert read(tokenizer, tokenizer.encode("caesura é")[:-1], size) == "caesura \ufffd"


def test_special_tokens_are_no_text(folder: Path):
    tokenizer = tokenizer_of(folder)
    (end,) = tokenizer.encode("<end>")
    assert read(tokenizer, [*tokenizer.encode("é"), end], 1) == "é"
    assert tokenizer.name(end) == "<end>"


def test_a_token_that_is_no_byte_is_no_text():
    assert read(ByteTokenizer(), [104, 300, 105], 1) == "h\ufffdi"
    assert ByteTokenizer().name(300) == "token_id:300"
