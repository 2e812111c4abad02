"""Llama-style models once more, in NumPy alone: from the equations and checkpoint tensors."""

import numpy as np

from tests.models.numpy_ouro import mlp, rms_norm, rotate


def rotate_pairs(x, theta):
    """x [S, heads, D]: neighbours (2 j, 2 j + 1) turned by position * theta ** (-2 j / D), as GGUF weights want it."""
    out = np.empty_like(x)
    for j in range(x.shape[-1] // 2):
        angle = np.arange(x.shape[0]) * theta ** (-2.0 * j / x.shape[-1])
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[:, :, 2 * j], x[:, :, 2 * j + 1]
        out[:, :, 2 * j], out[:, :, 2 * j + 1] = a * cos - b * sin, b * cos + a * sin
    return out


def attention(x, w, prefix, config, turn):
    steps, group = x.shape[0], config.num_heads // config.num_kv_heads
    q, k, v = ((x @ w[f"{prefix}.{p}_proj.weight"].T).reshape(steps, -1, config.head_dim) for p in "qkv")
    q, k = turn(q, config.rope_theta), turn(k, config.rope_theta)
    out = np.zeros_like(q)
    for head in range(config.num_heads):
        for row in range(steps):
            scores = k[: row + 1, head // group] @ q[row, head] / np.sqrt(config.head_dim)
            weights = np.exp(scores - scores.max())
            out[row, head] = weights / weights.sum() @ v[: row + 1, head // group]
    return out.reshape(steps, -1) @ w[f"{prefix}.o_proj.weight"].T


def forward(tensors, config, tokens, turn=rotate):
    """tokens [S] -> logits [S, V], in float64; tensors in Hugging Face names."""
    w = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    h = w["model.embed_tokens.weight"][tokens]
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}"
        x = rms_norm(h, w[f"{name}.input_layernorm.weight"], config.norm_eps)
        h = h + attention(x, w, f"{name}.self_attn", config, turn)
        x = rms_norm(h, w[f"{name}.post_attention_layernorm.weight"], config.norm_eps)
        h = h + mlp(x, w, f"{name}.mlp")
    h = rms_norm(h, w["model.norm.weight"], config.norm_eps)
    return h @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def random_tensors(config, dtype=np.float32) -> dict[str, np.ndarray]:
    """A checkpoint by the tensor list of the format, written out by hand."""
    rng = np.random.default_rng(0)
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    h, f, v = config.hidden_size, config.intermediate_size, config.vocab_size
    shapes = {"model.embed_tokens.weight": (v, h), "model.norm.weight": (h,)}
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (v, h)
    for layer in range(config.num_layers):
        name = f"model.layers.{layer}"
        shapes |= {
            f"{name}.self_attn.{p}_proj.weight": s for p, s in zip("qkvo", [(heads, h), (kv, h), (kv, h), (h, heads)])
        }
        shapes |= {f"{name}.mlp.{p}_proj.weight": s for p, s in zip(("gate", "up", "down"), [(f, h), (f, h), (h, f)])}
        shapes |= {f"{name}.{norm}_layernorm.weight": (h,) for norm in ("input", "post_attention")}
    return {
        name: np.asarray(
            rng.normal(size=shape) * shape[-1] ** -0.5 if len(shape) == 2 else 1 + 0.3 * rng.normal(size=shape), dtype
        )
        for name, shape in shapes.items()
    }
