"""What is known is recognised, whatever its numbers and names; a corpus that cannot be read is a clear error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.fuzz.case import CONFORMANCE, Finding, Signature, distinct
from harness.fuzz.hunt import primary
from harness.fuzz.known import CorpusError, Known, read_corpus, write_corpus


def finding(sentence: str, id: str = "cache-epoch", expected: str = "") -> Finding:
    return Finding(id=id, operations=3, seq=9, sentence=sentence, expected=expected)


def test_numbers_and_names_of_requests_and_versions_do_not_tell_failures_apart():
    first = Signature.of(finding("step 5 of r1 attends to stale KV"))
    assert first == Signature.of(finding("step 17 of r3 attends to stale KV"))
    assert Signature.of(finding("the version was set to v1")) == Signature.of(finding("the version was set to v3"))
    assert first != Signature.of(finding("step 5 of r1 attends to nothing"))
    assert first != Signature.of(finding("step 5 of r1 attends to stale KV", id="golden"))


def test_promises_tell_failures_apart_and_their_values_do_not():
    def stale(epoch: int, promise: str) -> Signature:
        return Signature.of(finding("step 5 of r1 attends to stale KV", expected=f"entries of epoch {epoch} only, as {promise}"))

    assert stale(1, "a clear was promised") == stale(2, "a clear was promised")
    assert stale(1, "a clear was promised") != stale(1, "no pause kept older ones")

    def wrong(expected: str) -> Signature:
        return Signature.of(finding("it is another", expected=expected))

    assert wrong("a block of [1, 2]") == wrong("a block of [7, 8, 9, ... 12 in all]") == wrong("a block of []")
    assert wrong("[default [0, 4), v2 [4, 9)]") == wrong("[v1 [0, 2)]") == wrong("")
    assert wrong("checksum 5f3a on every rank") == wrong("checksum 77 on every rank")


def test_each_failure_is_found_once_where_it_first_showed():
    early = finding("step 5 of r1 attends to stale KV")
    other = finding("step 7 of r2 attends to stale KV", expected="entries of epoch 1 only, as a clear was promised")
    later = replace(finding("step 7 of r2 attends to stale KV"), seq=early.seq + 2)
    assert distinct([later, replace(other, seq=early.seq + 1), early]) == (early, replace(other, seq=early.seq + 1))


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
