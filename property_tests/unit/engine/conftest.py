"""Tiny random checkpoints, engines over them, and an observer that writes down what it hears."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from engine import EngineConfig, EngineCore, Observer
from engine.scheduler import Scheduler

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,  # wide enough that the best token leads by far more than rounding
    "bos_token_id": None,
    "eos_token_id": None,
}


class Recorder(Observer):
    """Writes each call as one line. Digests become small numbers in order of appearance; sampled tokens are left out."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._labels: dict[object, int] = {}

    def stored(self, request_id, blocks):
        labelled = [f"{block}:{self._labels.setdefault(digest, len(self._labels))}" for block, digest in blocks]
        self.log.append(f"stored {request_id} {' '.join(labelled)}")

    def landed(self, step, sampled):
        self.log.append(f"landed {step} {' '.join(request_id for request_id, _ in sampled)}".rstrip())

    def take(self) -> list[str]:
        log, self.log = self.log, []
        return log


def _recording(name: str):
    def method(self, *args, **kwargs):
        said = [name, *(_words(value) for value in args), *(f"{key}={_words(value)}" for key, value in kwargs.items())]
        self.log.append(" ".join(said))

    return method


def _words(value: object) -> str:
    if isinstance(value, tuple | list):
        return "[" + " ".join(_words(item) for item in value) + "]"
    return str(value)


for _name in vars(Observer):
    if not _name.startswith("_") and _name not in vars(Recorder):
        setattr(Recorder, _name, _recording(_name))


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny tensors gain nothing from threads, and beside other processes spend most of their time waiting for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Callable[..., Path]:
    """checkpoint(kind, seed, tied): a folder with a random model; the same folder for the same arguments."""
    made: dict[tuple, Path] = {}

    def make(kind: str = "qwen3", *, seed: int = 0, tied: bool = False) -> Path:
        key = (kind, seed, tied)
        if key not in made:
            torch.manual_seed(seed)
            if kind == "qwen3":
                model = Qwen3ForCausalLM(Qwen3Config(**SHAPE, tie_word_embeddings=tied))
            else:
                model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=tied))
            made[key] = tmp_path_factory.mktemp(f"{kind}-{seed}")
            model.save_pretrained(made[key])
        return made[key]

    return make


def _config(**overrides) -> EngineConfig:
    shape = {
        "checkpoint": "unused",
        "block_size": 4,
        "num_blocks": 32,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
    }
    return EngineConfig(**{**shape, **overrides})


@pytest.fixture
def make_config() -> Callable[..., EngineConfig]:
    return _config


@pytest.fixture
def make_engine(checkpoint) -> Callable[..., EngineCore]:
    def make(*, observer: Observer | None = None, **overrides) -> EngineCore:
        return EngineCore(_config(**{"checkpoint": checkpoint(), **overrides}), observer=observer)

    return make


@pytest.fixture
def make_scheduler(recorder) -> Callable[..., Scheduler]:
    def make(*, eos_token_ids: tuple[int, ...] = (), **overrides) -> Scheduler:
        return Scheduler(_config(**overrides), eos_token_ids=eos_token_ids, observer=recorder)

    return make


@pytest.fixture
def drain() -> Callable[[EngineCore], dict[str, list[int]]]:
    """drain(engine): step until there is no work; the tokens that were handed over, by request."""

    def run(engine: EngineCore) -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {}
        while True:
            for output in engine.take_outputs():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
            if engine.pause_complete() and not engine.has_work():
                return tokens
            engine.step()

    return run
