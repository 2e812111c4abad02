"""Small GGUF files, as the tools of that format write them."""

from pathlib import Path

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["t h", "th e", "Ġ the", "1 2"]
TOKENS = [*SPECIAL, *sorted(ByteLevel.alphabet()), *(merge.replace(" ", "") for merge in MERGES)]
TEMPLATE = (
    "{% for message in messages %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def name_in_file(name: str) -> str:
    name = name.removesuffix(".weight")
    if name.startswith("model.layers."):
        _, _, layer, inner = name.split(".", 3)
        return f"blk.{layer}.{NAMES[inner]}.weight"
    return f"{NAMES[name]}.weight"


def can_quantise(tensor: np.ndarray) -> bool:
    """Matrices of whole blocks of 32 numbers."""
    return tensor.ndim == 2 and tensor.shape[1] % 32 == 0


def write_gguf(path: Path, tensors: dict[str, np.ndarray], config, *, quantised=None, leave_out=(), **fields) -> Path:
    """tensors by Hugging Face name, rows of queries and keys already in pairs; `fields` replace or add metadata."""
    writer = gguf.GGUFWriter(path, fields.pop("architecture", "llama"))
    numbers = {
        "llama.block_count": config.num_layers,
        "llama.context_length": config.max_positions,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_heads,
        "llama.attention.head_count_kv": config.num_kv_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.rope.dimension_count": config.head_dim,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    for name, value in numbers.items():
        if name not in leave_out:
            writer.add_uint32(name, value)
    writer.add_float32("llama.rope.freq_base", config.rope_theta)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config.norm_eps)
    texts = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.chat_template": TEMPLATE}
    for name, value in (texts | fields).items():
        writer.add_string(name, value)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(MERGES)
    for name, tensor in tensors.items():
        stored = name_in_file(name) if name.endswith(".weight") else name
        if quantised is not None and can_quantise(tensor):
            writer.add_tensor(stored, gguf.quantize(tensor, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(stored, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
