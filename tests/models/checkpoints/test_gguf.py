"""GGUF files: the order of rotary rows, dequantisation, bad files, the tokenizer."""

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import checkpoints
from models.chat import chat_prompt
from models.checkpoints import CheckpointError, gguf_files
from models.tokenizers import SubwordTokenizer, for_folder
from tests.models import numpy_llama
from tests.models.checkpoints.gguf_writing import TOKENS, can_quantise, write_gguf
from tests.models.configs import small_llama

CONFIG = small_llama(num_layers=2, vocab_size=len(TOKENS), bos_id=1, stop_ids=(0, 2))
TENSORS = numpy_llama.random_tensors(CONFIG)
IDS = np.random.default_rng(1).integers(0, CONFIG.vocab_size, 17)
Q = "model.layers.1.self_attn.q_proj.weight"
forward = nnx.jit(lambda model, tokens: model.logits(model.forward(tokens).hidden[0])[0])


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return write_gguf(tmp_path_factory.mktemp("gguf") / "model.gguf", TENSORS, CONFIG)


@pytest.fixture(scope="module")
def expected():
    """Logits of the convention of these files: neighbours are rotated."""
    return numpy_llama.forward(TENSORS, CONFIG, IDS, turn=numpy_llama.rotate_pairs)


def load_logits(place):
    config, model = checkpoints.load(place, dtype=jnp.float32)
    assert config == CONFIG
    return np.asarray(forward(model, jnp.asarray(IDS)[None]))


def test_rows_of_rotated_pairs_become_halves(file, expected):
    np.testing.assert_allclose(load_logits(file), expected, atol=1e-4, rtol=0)


def test_mutation_rows_left_as_they_are_run_and_are_wrong(file, expected, monkeypatch):
    monkeypatch.setattr(gguf_files, "halves_from_pairs", lambda weight, heads: weight)
    logits = load_logits(file)
    assert np.isfinite(logits).all()
    assert np.abs(logits - expected).max() > 0.1


def test_the_same_model_from_both_formats_has_the_same_bits(tmp_path, file):
    """Written by hand, so that the loader's own function is no part of it: row 2 i + j of a head was i + j D / 2."""
    tensors = dict(TENSORS)
    for name, tensor in TENSORS.items():
        if "q_proj" in name or "k_proj" in name:
            rows = [h * 8 + 2 * i + j for h in range(len(tensor) // 8) for j in range(2) for i in range(4)]
            tensors[name] = tensor[rows]
    _, model = checkpoints.load(file, dtype=jnp.float32)
    checkpoints.save(tmp_path / "hf", model)
    again = checkpoints.load(tmp_path / "hf", dtype=jnp.float32)[1]
    for layer in range(2):
        stored = tensors[f"model.layers.{layer}.self_attn.k_proj.weight"]
        np.testing.assert_array_equal(again.layers.k_proj[layer], stored)
    np.testing.assert_allclose(
        forward(again, jnp.asarray(IDS)[None]), numpy_llama.forward(tensors, CONFIG, IDS), atol=1e-4, rtol=0
    )


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
def test_quantised_matrices_are_dequantised(tmp_path, expected, kind):
    """Equal to NumPy with the rounded numbers, and not to NumPy with the original ones."""
    kind = gguf.GGMLQuantizationType[kind]
    stored = {
        name: gguf.dequantize(gguf.quantize(tensor, kind), kind) if can_quantise(tensor) else tensor
        for name, tensor in TENSORS.items()
    }
    path = write_gguf(tmp_path / "model.gguf", TENSORS, CONFIG, quantised=kind)
    logits = load_logits(path)
    exact = numpy_llama.forward(stored, CONFIG, IDS, turn=numpy_llama.rotate_pairs)
    np.testing.assert_allclose(logits, exact, atol=1e-4, rtol=0)
    assert np.abs(logits - expected).max() > 0.02


def test_a_folder_with_one_file_is_that_file(file, tmp_path):
    config, _ = checkpoints.load(file.parent)
    assert config == checkpoints.read_config(file) == CONFIG
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(file.read_bytes())
    with pytest.raises(CheckpointError, match=r"several models, name one of: .*a\.gguf, .*b\.gguf"):
        checkpoints.load(tmp_path)


def test_an_untied_head_is_read(tmp_path):
    config = small_llama(num_layers=1, vocab_size=len(TOKENS), bos_id=1, stop_ids=(0, 2), tied_embeddings=False)
    tensors = numpy_llama.random_tensors(config)
    found, model = checkpoints.load(write_gguf(tmp_path / "m.gguf", tensors, config), dtype=jnp.float32)
    assert found == config
    np.testing.assert_array_equal(model.lm_head[...], tensors["lm_head.weight"])


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({name: t for name, t in TENSORS.items() if name != Q}, r"missing: blk\.1\.attn_q\.weight"),
        (TENSORS | {Q: TENSORS[Q][:-8]}, r"shape: blk\.1\.attn_q\.weight \(is \[40, 32\], should be \[48, 32\]\)"),
        (TENSORS | {"rope_freqs.w": np.ones(4, np.float32)}, r"unknown: rope_freqs\.w"),
        (TENSORS | {Q: TENSORS[Q].astype(np.int32)}, r"dtype: blk\.1\.attn_q\.weight \(is I32"),
    ],
)
def test_wrong_tensors_are_named_before_any_is_read(tmp_path, tensors, message, monkeypatch):
    path = write_gguf(tmp_path / "model.gguf", tensors, CONFIG)
    monkeypatch.setattr(gguf_files.GGUFModel, "read", lambda *_: pytest.fail("read"))
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architecture": "gemma"}, "general.architecture = 'gemma'"),
        ({"leave_out": ("llama.block_count", "llama.embedding_length")}, "lacks llama.block_count, llama.embedding_"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type = 'yarn'"),
    ],
)
def test_other_models_are_refused_by_field(tmp_path, fields, message):
    with pytest.raises(CheckpointError, match=message):
        checkpoints.load(write_gguf(tmp_path / "model.gguf", TENSORS, CONFIG, **fields))


@pytest.mark.parametrize("cut", [0, 3, 200, 9000, -5000])
def test_a_cut_file_is_named(tmp_path, file, cut):
    (tmp_path / "model.gguf").write_bytes(file.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match=r"model\.gguf is not a sound GGUF file"):
        checkpoints.load(tmp_path)


def test_tokenizer_merges_and_splits_digits_singly(file):
    tokenizer = for_folder(file.parent)
    assert isinstance(tokenizer, SubwordTokenizer)
    ids = tokenizer.encode("the the 12<|im_end|>")
    assert [TOKENS[n] for n in ids] == ["the", "Ġthe", "Ġ", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(ids) == "the the 12"
    text = "naïve 🙂 τέλος\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_other_tokenizers_are_refused_by_field(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", TENSORS, CONFIG, **{"tokenizer.ggml.pre": "llama-bpe"})
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.pre = 'llama-bpe' \(supported: 'smollm', 'gpt-2'\)"):
        for_folder(path)


def test_chat_template_is_that_of_the_file(file, tmp_path):
    assert chat_prompt(file, "Hi.") == "<|im_start|>user\nHi.<|im_end|>\n<|im_start|>assistant\n"
    broken = write_gguf(tmp_path / "model.gguf", TENSORS, CONFIG, **{"tokenizer.chat_template": "{% for %}"})
    with pytest.raises(ValueError, match=r"chat template of .* cannot be used"):
        chat_prompt(broken, "Hi.")
