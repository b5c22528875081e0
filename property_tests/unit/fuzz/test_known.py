"""What is known is recognised, whatever its numbers and names; a corpus that cannot be read is a clear error."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.fuzz.case import CONFORMANCE, Finding, Signature
from harness.fuzz.hunt import primary
from harness.fuzz.known import CorpusError, Known, read_corpus, write_corpus


def finding(sentence: str, id: str = "cache-epoch") -> Finding:
    return Finding(id=id, operations=3, seq=9, sentence=sentence)


def test_numbers_and_names_of_requests_and_versions_do_not_tell_failures_apart():
    first = Signature.of(finding("step 5 of r1 attends to stale KV"))
    assert first == Signature.of(finding("step 17 of r3 attends to stale KV"))
    assert Signature.of(finding("the version was set to v1")) == Signature.of(finding("the version was set to v3"))
    assert first != Signature.of(finding("step 5 of r1 attends to nothing"))
    assert first != Signature.of(finding("step 5 of r1 attends to stale KV", id="golden"))


def test_a_case_is_reported_as_what_is_new_before_what_is_known_and_as_an_invariant_before_the_model():
    known, unexplained, new = finding("this"), finding("that", id=CONFORMANCE), finding("another", id="golden")
    assert primary([known, unexplained, new]) == known
    assert primary([known, unexplained, new], {Signature.of(known)}) == new
    assert primary([known, unexplained], {Signature.of(known)}) == unexplained


def test_a_corpus_reads_back_and_a_missing_one_is_empty(tmp_path: Path):
    known = [Known(Signature("golden", "R's token N differs"), "scenarios/regressions/one.yaml")]
    write_corpus(tmp_path / "corpus.yaml", known)
    assert read_corpus(tmp_path / "corpus.yaml") == known
    assert read_corpus(tmp_path / "none.yaml") == []


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("failures: [", "corpus.yaml:1: no YAML"),
        ("- 1\n", "expected `schema: 1` and a list `failures`, got \\[1\\]"),
        ("schema: 2\nfailures: []\n", "expected `schema: 1`"),
        ("schema: 1\nfailures: [{id: golden}]\n", "failure 1: expected texts id, words, source, got {'id': 'golden'}"),
    ],
)
def test_a_corrupt_corpus_names_the_file_and_what_to_do(text: str, told: str, tmp_path: Path):
    (tmp_path / "corpus.yaml").write_text(text)
    with pytest.raises(CorpusError, match=told) as caught:
        read_corpus(tmp_path / "corpus.yaml")
    assert "mend the file, or move it away" in str(caught.value)


def test_a_corpus_that_is_no_text_or_cannot_be_written_is_told(tmp_path: Path):
    (tmp_path / "corpus.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CorpusError, match="cannot be read as text"):
        read_corpus(tmp_path / "corpus.yaml")
    with pytest.raises(CorpusError, match="cannot be written"):
        write_corpus(tmp_path / "no" / "folder.yaml", [])
