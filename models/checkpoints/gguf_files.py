"""GGUF files of Llama-style models: metadata to a configuration, quantised tensors to float32.

In these files the rows of each query and key head are ordered for rotation of neighbours, pairs (2 i, 2 i + 1); this
project rotates halves, pairs (i, i + D / 2). `halves_from_pairs` puts the rows back. Without it nothing fails and the
model speaks nonsense.
"""

import functools
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from models.checkpoints.errors import CheckpointError, Problems
from models.llama import LlamaConfig

LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
"""Hugging Face name inside a layer -> GGUF name inside a block."""

OTHER_TENSORS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
END_TEXTS = ("<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<|end_of_text|>", "</s>")
"""Control tokens that end a text, whatever the metadata says of them: it names one, and chat and text end with two."""
CONTROL = int(gguf.TokenType.CONTROL)


def find(place: Path) -> Path | None:
    """The GGUF file at a place: itself, or the only one in a folder without `config.json`; None where there is none.

    Raises CheckpointError for a folder with several.
    """
    if place.suffix == ".gguf" and place.is_file():
        return place
    if (place / "config.json").is_file():
        return None
    files = sorted(place.glob("*.gguf"))
    if len(files) > 1:
        raise CheckpointError(f"{place} holds several models, name one of: {', '.join(str(file) for file in files)}")
    return files[0] if files else None


class _Reader(gguf.GGUFReader):
    """The package's reader over a plain view of the mapped file: a million slices of a memmap take twice the time."""

    @property  # type: ignore[override]
    def data(self) -> np.ndarray:
        """The bytes of the file."""
        return self._data

    @data.setter
    def data(self, mapped: np.ndarray) -> None:
        self._data = np.asarray(mapped)


class GGUFModel:
    """An opened file: fields by name, tensors by Hugging Face name. Tensors are read when they are asked for."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self.reader = _Reader(path)
        except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
            raise CheckpointError(f"{path} is not a sound GGUF file: {error}") from error
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}

    def field(self, name: str, default: Any = None) -> Any:
        """The value of a metadata field."""
        found = self.reader.fields.get(name)
        return default if found is None else found.contents()

    @functools.cached_property
    def tokens(self) -> list[str]:
        """The vocabulary, in the order of the ids. Raises CheckpointError without one."""
        tokens = self.field("tokenizer.ggml.tokens")
        if not tokens:
            raise CheckpointError(f"{self.path} lacks tokenizer.ggml.tokens")
        return tokens

    @functools.cached_property
    def config(self) -> LlamaConfig:
        """The configuration. Raises CheckpointError that names the fields which are missing or not computed here."""
        architecture = self.field("general.architecture")
        if architecture != "llama":
            raise CheckpointError(f"{self.path} says general.architecture = {architecture!r} (supported: 'llama')")
        names = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
        if missing := [f"llama.{name}" for name in names if self.field(f"llama.{name}") is None]:
            raise CheckpointError(f"{self.path} lacks {', '.join(missing)}")
        layers, hidden, wide, heads = (int(self.field(f"llama.{name}")) for name in names)
        head_dim = int(self.field("llama.attention.key_length", hidden // heads))
        self._refuse_other_computations(head_dim)
        return LlamaConfig(
            vocab_size=int(self.field("llama.vocab_size", len(self.tokens))),
            hidden_size=hidden,
            intermediate_size=wide,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=int(self.field("llama.attention.head_count_kv", heads)),
            head_dim=head_dim,
            rope_theta=_short(self.field("llama.rope.freq_base", 1e4)),
            norm_eps=_short(self.field("llama.attention.layer_norm_rms_epsilon", 1e-5)),
            max_positions=int(self.field("llama.context_length", 2048)),
            tied_embeddings="output.weight" not in self.tensors,
            bos_id=self.field("tokenizer.ggml.bos_token_id"),
            stop_ids=self._stop_ids(),
        )

    def _refuse_other_computations(self, head_dim: int) -> None:
        """Each field that would change the computation must say what this model does."""
        allowed = {
            "llama.rope.dimension_count": (None, head_dim),
            "llama.attention.value_length": (None, head_dim),
            "llama.rope.scaling.type": (None, "none"),
            "llama.rope.scale_linear": (None, 1.0),
            "llama.expert_count": (None, 0),
            "llama.attention.sliding_window": (None, 0),
        }
        wrong = [
            f"{name} = {self.field(name)!r} (supported: {', '.join(map(repr, values))})"
            for name, values in allowed.items()
            if self.field(name) not in values
        ]
        if wrong:
            raise CheckpointError(f"{self.path} asks for what this Llama does not compute: " + "; ".join(wrong))

    def _stop_ids(self) -> tuple[int, ...]:
        named = {self.field(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")} - {None}
        kinds = self.field("tokenizer.ggml.token_type", [])
        ends = {n for n, (token, kind) in enumerate(zip(self.tokens, kinds)) if kind == CONTROL and token in END_TEXTS}
        return tuple(sorted({int(n) for n in named} | ends))

    def check(self, expected: dict[str, tuple[int, ...]]) -> None:
        """Judge every tensor before any is read. Raises CheckpointError that names all that do not fit."""
        problems = Problems()
        wanted = {gguf_name(name): shape for name, shape in expected.items()}
        for name, tensor in self.tensors.items():
            if name not in wanted:
                problems.add("unknown", name)
            elif problems.judge_shape(name, tuple(int(n) for n in reversed(tensor.shape)), wanted[name]):
                try:
                    gguf.dequantize(tensor.data[:1], tensor.tensor_type)
                except NotImplementedError:
                    problems.add("dtype", f"{name} (is {tensor.tensor_type.name}, which gguf does not dequantise)")
        for name in wanted:
            if name not in self.tensors:
                problems.add("missing", name)
        problems.check(self.path)

    def read(self, name: str) -> np.ndarray:
        """A tensor by its Hugging Face name, dequantised to float32, its rows in the order of this project."""
        tensor = self.tensors[gguf_name(name)]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if name.endswith("q_proj.weight"):
            return halves_from_pairs(values, self.config.num_heads)
        if name.endswith("k_proj.weight"):
            return halves_from_pairs(values, self.config.num_kv_heads)
        return values


def halves_from_pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Order the D rows of each head of weight [heads * D, H] as two halves: row 2 i + j goes to i + j * D / 2."""
    return weight.reshape(heads, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def gguf_name(name: str) -> str:
    """The GGUF name of a tensor: model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name):
        return f"blk.{match[1]}.{LAYER_TENSORS[match[2]]}.weight"
    return f"{OTHER_TENSORS[name.removesuffix('.weight')]}.weight"


def open_gguf(path: Path) -> GGUFModel:
    """Open a file; the last one stays open, because parsing it takes seconds and its tokenizer is wanted too."""
    status = path.stat()
    return _open(path.resolve(), status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1)
def _open(path: Path, changed: int, size: int) -> GGUFModel:
    del changed, size  # they make another file of the same name another one
    return GGUFModel(path)


def _short(value: float) -> float:
    """The shortest number that rounds to this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))
