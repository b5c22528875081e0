"""Tracer tokens against the truth: plain transformers, a KV cache, and weights that are swapped under it.

Run as a script, this module measures the table of docs/tracer.md: `PYTHONPATH=. python property_tests/unit/test_tracer.py`.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from harness.tracer import UNTRACED, Break, CodeBook, Decoder, Mislabel, NotATracer, make_tracer

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

DTYPES = ("float32", "bfloat16")
FAMILIES = ("qwen3", "llama")


class Engine:
    """Greedy decoding with a KV cache, whose entries it knows the writers of."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.decoder = Decoder.from_folder(out / "v1")
        self.model = _load(out / "v1", "sdpa")
        self.weights = {folder.name: _load(folder, "sdpa").state_dict() for folder in out.iterdir()}
        self.load("v1")
        self.clear()

    def load(self, version: str) -> None:
        self.version = version
        self.model.load_state_dict(self.weights[version])

    def clear(self) -> None:
        self.cache, self.writers = transformers.DynamicCache(), []

    def feed(self, tokens: Sequence[int]) -> int:
        """Write the tokens' KV and sample the next one."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([tokens]), past_key_values=self.cache, logits_to_keep=1).logits
        self.writers += [self.version] * len(tokens)
        return int(logits[0, -1].argmax())

    def generate(self, tokens: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        """`count` tokens, and for each the true stale share that it attended to."""
        output: list[int] = []
        shares: list[float] = []
        for _ in range(count):
            output.append(self.feed(output[-1:] or tokens))
            shares.append(1 - self.writers.count(self.version) / len(self.writers))
        return output, shares


def _load(folder: Path, attention: str) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation=attention).eval()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """A model of one layer and 32 dimensions only waits for further threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=list(product(FAMILIES, DTYPES)), ids="-".join)
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Engine:
    family, dtype = request.param
    out = tmp_path_factory.mktemp("tracer")
    make_tracer(out, family=family, dtype=dtype, versions=3)
    return Engine(out)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(CodeBook())


def generated(book: CodeBook, version: int, level: int, position: int) -> int:
    return book.prompt_tokens + ((version - 1) * book.levels + level) * book.period + position % book.period


def chain(decoder: Decoder, prompt: Sequence[int], versions: Sequence[int]) -> list[int]:
    """The output of an honest run whose tokens `versions` sampled."""
    first = decoder.code_book.position(prompt[-1]) + 1
    return [generated(decoder.code_book, version, 0, first + i) for i, version in enumerate(versions)]


# With a model


def test_share_of_each_token_holds_the_truth_when_weights_change_over_a_kept_cache(engine: Engine) -> None:
    engine.clear()
    versions = ("v1", "v2", "v3", "v2")
    prompt = engine.decoder.prompt(21, seed=5)
    output: list[int] = []
    shares: list[float] = []
    for version in versions:
        engine.load(version)
        more = engine.generate(output[-1:] or prompt, 15)
        output, shares = output + more[0], shares + more[1]
    trace = engine.decoder.decode(prompt, output)
    assert trace.spans == tuple((version, 15 * i, 15 * i + 15) for i, version in enumerate(versions))
    assert trace.breaks == ()
    assert all(share and share.holds(true) for share, true in zip(trace.shares, shares, strict=True))
    assert trace.stale == tuple(range(15, 15 * len(versions)))


def test_share_stays_zero_when_new_weights_recompute_the_context_in_chunks(engine: Engine) -> None:
    engine.clear()
    engine.load("v1")
    prompt = engine.decoder.prompt(21)
    old, _ = engine.generate(prompt, 10)
    engine.clear()
    engine.load("v3")
    context = [*prompt, *old]
    engine.feed(context[:13])
    engine.feed(context[13:20])
    new, _ = engine.generate(context[20:], 10)
    trace = engine.decoder.decode(prompt, old + new)
    assert trace.spans == (("v1", 0, 10), ("v3", 10, 20))
    assert trace.stale == () and trace.breaks == ()


def test_a_stale_prefix_hit_shows_in_the_first_token(engine: Engine) -> None:
    engine.clear()
    engine.load("v1")
    shared = engine.decoder.prompt(16)
    engine.feed(shared)
    engine.load("v2")
    suffix = engine.decoder.prompt(48, seed=9, after=shared)
    output, shares = engine.generate(suffix, 1)
    trace = engine.decoder.decode(suffix, output)
    assert shares == [0.25]
    assert trace.shares[0] and trace.shares[0].nearest == 0.25


def test_a_head_and_values_of_two_versions_are_told_as_torn(engine: Engine) -> None:
    engine.clear()
    engine.load("v1")
    engine.model.load_state_dict({"lm_head.weight": engine.weights["v2"]["lm_head.weight"]}, strict=False)
    trace = engine.decoder.decode([7], [engine.feed([7])])
    assert trace.versions == ("v2",)
    assert trace.shares[0] and trace.shares[0].is_torn


def test_positions_wrap_and_hold_over_4096_tokens_of_context(engine: Engine) -> None:
    engine.clear()
    engine.load("v1")
    prompt = engine.decoder.prompt(3000)
    first, _ = engine.generate(prompt, 1)
    engine.load("v2")
    tail = engine.decoder.prompt(1076, seed=1, after=first)
    output, shares = engine.generate([*first, *tail], 20)
    trace = engine.decoder.decode(tail, output)
    assert len(engine.writers) == 4096
    assert trace.breaks == () and trace.versions == ("v2",) * 20
    assert all(share and share.holds(true) for share, true in zip(trace.shares, shares, strict=True))


def test_one_stale_entry_among_4096_is_told_from_none(engine: Engine) -> None:
    for stale in (0, 1):
        engine.clear()
        for version, count in (("v1", stale), ("v2", 4096 - stale)):
            engine.load(version)
            token = engine.feed(engine.decoder.prompt(count)) if count else 0
        share = engine.decoder.code_book.share(token)
        assert share and share.is_fresh == (not stale) and share.nearest == 0


def test_sampling_at_temperature_1_gives_the_greedy_token(engine: Engine) -> None:
    engine.clear()
    engine.load("v1")
    with torch.inference_mode():
        logits = engine.model(torch.tensor([engine.decoder.prompt(50)]), logits_to_keep=1).logits
    assert logits[0, -1].float().softmax(0).max() > 1 - 1e-6


def test_random_prompts_start_the_chain_at_their_last_token(engine: Engine) -> None:
    engine.clear()
    engine.load("v1")
    prompt = [200, 16, 31, 31, 255]
    output, _ = engine.generate(prompt, 3)
    assert engine.decoder.decode(prompt, output).breaks == ()
    assert [engine.decoder.code_book.position(token) for token in output] == [0, 1, 2]


def test_text_of_the_tokenizer_reads_back_as_the_same_tokens(engine: Engine) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(engine.out / "v2")
    tokens = (*engine.decoder.prompt(3), generated(engine.decoder.code_book, 2, 5, 17))
    text = tokenizer.decode(tokens)
    assert text.endswith("v2:4/16:017")
    assert engine.decoder.tokens(text) == tokens == tuple(tokenizer(text)["input_ids"])


# The sweep


class Swept(NamedTuple):
    """How far decoded shares were from the truth, over pairs of a context length and a number of stale entries."""

    pairs: int
    wrong_version_or_position: int
    wrong_zero: int
    """Pairs with no stale entry that decoded to some, or the other way round."""

    exact_shares: int
    wrong_exact_shares: int
    """Pairs whose share is a whole multiple of one share, and those of them that decoded to another one."""

    off_by_one: int
    """Pairs that decoded to the neighbour of the level that they belong to."""

    beyond: float
    """The furthest that the share of such a pair lay beyond the threshold."""


def sweep(out: Path, *, attention: str, lengths: Sequence[int], samples: int) -> Swept:
    """Decode one token of v2 over caches of real v1 and v2 entries: all stale counts for short contexts, `samples` for long ones."""
    book = Decoder.from_folder(out / "v1").code_book
    prompt = [Decoder(book).prompt(max(lengths))]
    entries = {}
    for version in ("v1", "v2"):
        cache = transformers.DynamicCache()
        model = _load(out / version, attention)
        with torch.inference_mode():
            for start in range(0, max(lengths), 512):
                model(torch.tensor(prompt)[:, start : start + 512], past_key_values=cache, logits_to_keep=1)
        entries[version] = cache.layers[0].keys, cache.layers[0].values
    swept = Swept(0, 0, 0, 0, 0, 0, 0.0)
    for length in lengths:
        counts = _stale_counts(book, length, samples)
        for first in range(0, len(counts), 16):
            batch = counts[first : first + 16]
            cache = transformers.DynamicCache()
            cache.update(*(_mixed(old, new, batch, length - 1) for old, new in zip(*entries.values(), strict=True)), 0)
            with torch.inference_mode():
                last = torch.full((len(batch), 1), prompt[0][length - 1])
                tokens = model(last, past_key_values=cache).logits[:, -1].argmax(-1).tolist()
            for stale, token in zip(batch, tokens, strict=True):
                swept = _judge(swept, book, token, stale=stale, length=length, position=prompt[0][length - 1] + 1)
    return swept


def _mixed(old: Any, new: Any, counts: Sequence[int], length: int) -> Any:
    """[len(counts), heads, length, dim]: for each count that many old entries, then new ones."""
    return torch.cat([torch.cat([old[:, :, :count], new[:, :, count:length]], 2) for count in counts])


def _stale_counts(book: CodeBook, length: int, samples: int) -> list[int]:
    """Stale entries out of `length`: the extremes, both sides of every threshold, every whole share, and an even spread."""
    if length <= samples:
        return list(range(length))
    near = [int(threshold * length) + i for threshold in book.thresholds for i in (0, 1)]
    whole = [i * length // book.shares for i in range(book.shares + 1)]
    spread = [i * length // samples for i in range(samples)]
    return sorted({k for k in (0, 1, 2, length - 2, length - 1, *near, *whole, *spread) if k < length})


def _judge(swept: Swept, book: CodeBook, token: int, *, stale: int, length: int, position: int) -> Swept:
    share, true = book.share(token), stale / length
    wrong = book.version(token) != "v2" or book.position(token) != position % book.period
    if wrong or share is None:
        return swept._replace(pairs=swept.pairs + 1, wrong_version_or_position=swept.wrong_version_or_position + 1)
    inner = (0.0, *book.thresholds, 1.0)
    beyond = max(inner[share.level] - true, true - inner[share.level + 1], 0.0)
    exact = stale * book.shares % length == 0
    return swept._replace(
        pairs=swept.pairs + 1,
        wrong_zero=swept.wrong_zero + (share.is_fresh != (stale == 0)),
        exact_shares=swept.exact_shares + exact,
        wrong_exact_shares=swept.wrong_exact_shares + (exact and share.nearest != true),
        off_by_one=swept.off_by_one + (beyond > 0),
        beyond=max(swept.beyond, beyond),
    )


def test_shares_decode_as_finely_as_the_code_book_says(engine: Engine) -> None:
    book = engine.decoder.code_book
    attention = {"qwen3": "sdpa", "llama": "eager"}[engine.model.config.model_type]
    swept = sweep(engine.out, attention=attention, lengths=(1, 2, 7, 16, 33, 73, 257, 1024), samples=20)
    assert swept.pairs >= 250
    assert swept.wrong_version_or_position == swept.wrong_zero == swept.wrong_exact_shares == 0
    assert swept.beyond <= book.margin, swept
    assert book.dtype == "bfloat16" or swept.off_by_one == 0


# Without a model


def test_a_lost_token_is_reported_where_it_is_missing(decoder: Decoder) -> None:
    prompt = decoder.prompt(5)
    output = chain(decoder, prompt, [1] * 300)
    expected = (decoder.code_book.position(prompt[-1]) + 261) % 256
    assert decoder.decode(prompt, output[:260] + output[261:]).breaks == (Break(260, "lost", expected, (expected + 1) % 256, 1),)
    assert decoder.decode(prompt, output[2:]).breaks[0][:2] == (0, "lost")


def test_doubled_tokens_are_reported_with_their_number(decoder: Decoder) -> None:
    prompt = decoder.prompt(5)
    output = chain(decoder, prompt, [1] * 20)
    assert [(b.index, b.kind, b.count) for b in decoder.decode(prompt, output[:9] + output[8:]).breaks] == [(9, "doubled", 1)]
    assert [(b.index, b.kind, b.count) for b in decoder.decode(prompt, output[:9] + output[4:]).breaks] == [(9, "doubled", 5)]


def test_a_token_behind_all_output_is_shifted_not_doubled(decoder: Decoder) -> None:
    prompt = decoder.prompt(5)
    last = decoder.code_book.position(prompt[-1])
    assert decoder.decode(prompt, chain(decoder, prompt[:-1], [1] * 4)).breaks == (Break(0, "shifted", (last + 1) % 256, last, 1),)


def test_a_prompt_token_among_the_output_is_foreign(decoder: Decoder) -> None:
    prompt = decoder.prompt(5)
    trace = decoder.decode(prompt, [*chain(decoder, prompt, [1, 1]), decoder.prompt(1)[0]])
    assert trace.breaks[0][:2] == (2, "foreign")
    assert trace.spans == (("v1", 0, 2), (UNTRACED, 2, 3))
    assert trace.shares[2] is None


def test_wrong_labels_are_reported_with_the_true_version(decoder: Decoder) -> None:
    prompt = decoder.prompt(5)
    trace = decoder.decode(prompt, chain(decoder, prompt, [1] * 4 + [2] * 6))
    names = {"default": "v1"}
    assert trace.mislabelled([("default", 0, 4), ("v2", 4, 10)], names) == ()
    assert trace.mislabelled([("default", 0, 5), ("v2", 5, 10)], names) == (Mislabel(4, 5, "default", "v2"),)
    assert trace.mislabelled([("v2", 4, 9)]) == (Mislabel(0, 4, None, "v1"), Mislabel(9, 10, None, "v2"))
    assert trace.mislabelled((*trace.spans, ("v2", 10, 11))) == (Mislabel(10, 11, "v2", None),)
    assert trace.mislabelled((*trace.spans, ("v2", 8, 10))) == (Mislabel(8, 10, "v2", "v2"),)


def test_prompts_of_one_seed_share_their_beginning_and_continue_what_they_follow(decoder: Decoder) -> None:
    short, long = decoder.prompt(10, seed=3), decoder.prompt(300, seed=3)
    assert long[:10] == short != decoder.prompt(10, seed=4)
    positions = [decoder.code_book.position(token) for token in (*long, *decoder.prompt(10, after=long))]
    assert all((here + 1) % 256 == there for here, there in pairwise(positions))


def test_every_token_has_a_name_of_its_own() -> None:
    book = CodeBook(versions=2, period=16)
    names = [book.name(token) for token in range(book.vocabulary)]
    assert len(set(names)) == book.vocabulary
    assert names[book.prompt_tokens + 16] == "v1:0+:00"


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ({"versions": 1}, "2 to 64 versions, got 1"),
        ({"shares": 12}, "shares must be .* got 12"),
        ({"shares": 32, "dtype": "bfloat16"}, "got 32 in bfloat16"),
        ({"period": 100}, "the period must be .* got 100"),
        ({"colours": 0}, "1 to 256 colours .* got 0"),
        ({"context": 16}, "the context must be .* got 16"),
    ],
)
def test_a_code_book_refuses_what_no_checkpoint_can_hold(numbers: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CodeBook(**numbers)


def test_tokens_of_another_vocabulary_are_refused(decoder: Decoder) -> None:
    with pytest.raises(ValueError, match="expected one of this tracer's vocabulary"):
        decoder.decode([1], [decoder.code_book.vocabulary])
    with pytest.raises(ValueError, match="empty prompt"):
        decoder.decode([], [1])
    with pytest.raises(ValueError, match="v9:0:000"):
        decoder.tokens("v9:0:000")


def test_a_folder_that_is_no_tracer_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(NotATracer, match=r"no tracer checkpoint.*caesura checkpoint tracer"):
        Decoder.from_folder(tmp_path)
    for content in ("{", '{"format": "caesura-tracer-9", "version": "v1", "code_book": {}}'):
        (tmp_path / "tracer.json").write_text(content)
        with pytest.raises(NotATracer, match="cannot be read"):
            Decoder.from_folder(tmp_path)


def test_a_tracer_of_eight_versions_is_small_and_the_same_bytes_each_time(tmp_path: Path) -> None:
    digests = []
    for out in (tmp_path / "a", tmp_path / "b"):
        make_tracer(out, dtype="float32")
        assert sorted(path.name for path in out.iterdir()) == [f"v{i}" for i in range(1, 9)]
        assert all(sum(file.stat().st_size for file in folder.iterdir()) < 25_000_000 for folder in out.iterdir())
        digests.append([hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(out.rglob("*.*"))])
    assert digests[0] == digests[1]


def test_an_unknown_family_or_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'gpt2', expected 'qwen3' or 'llama'"):
        make_tracer(tmp_path, family="gpt2")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="'float16', expected 'float32' or 'bfloat16'"):
        make_tracer(tmp_path, dtype="float16")  # pyright: ignore[reportArgumentType]


def test_decoding_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from harness.tracer import Decoder, CodeBook; Decoder(CodeBook()).decode([1], [])"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


LENGTHS = (*range(1, 65), 100, 129, 256, 257, 500, 512, 1000, 1024, 2048, 3000, 4095, 4096)
MEASURED = [
    *product(("qwen3",), DTYPES, (8, 16), ("sdpa",)),
    ("qwen3", "float32", 32, "sdpa"),
    *product(("qwen3",), DTYPES, (16,), ("eager",)),
    *product(("llama",), DTYPES, (16,), ("sdpa",)),
]


def _table() -> Iterator[str]:
    yield "| family | dtype | shares | attention | pairs | place | zero | whole shares | off by one | beyond | margin |"
    yield "|---|---|---|---|---|---|---|---|---|---|---|"
    for family, dtype, shares, attention in MEASURED:
        with tempfile.TemporaryDirectory() as folder:
            book = make_tracer(Path(folder), family=family, dtype=dtype, shares=shares)
            swept = sweep(Path(folder), attention=attention, lengths=LENGTHS, samples=32)
        yield (
            f"| {family} | {dtype} | {shares} | {attention} | {swept.pairs} | {swept.wrong_version_or_position} | {swept.wrong_zero}"
            f" | {swept.wrong_exact_shares} of {swept.exact_shares} | {swept.off_by_one / swept.pairs:.1%}"
            f" | {swept.beyond:.4f} | {book.margin:.4f} |"
        )


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    for row in _table():
        print(row, flush=True)
