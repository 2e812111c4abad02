"""Ouro once more, in NumPy alone: from the equations and checkpoint tensors, sharing no code with `models`."""

import numpy as np


def rms_norm(x, weight, eps):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x, theta):
    """x [S, heads, D] at positions 0 .. S-1: pairs (j, j + D/2) turned by position * theta ** (-2 j / D)."""
    steps, _, width = x.shape
    out = np.empty_like(x)
    for j in range(width // 2):
        angle = np.arange(steps) * theta ** (-2.0 * j / width)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        a, b = x[:, :, j], x[:, :, j + width // 2]
        out[:, :, j], out[:, :, j + width // 2] = a * cos - b * sin, b * cos + a * sin
    return out


def attention(x, w, prefix, config):
    steps = x.shape[0]
    q = (x @ w[f"{prefix}.q_proj.weight"].T).reshape(steps, config.num_heads, config.head_dim)
    k = (x @ w[f"{prefix}.k_proj.weight"].T).reshape(steps, config.num_kv_heads, config.head_dim)
    v = (x @ w[f"{prefix}.v_proj.weight"].T).reshape(steps, config.num_kv_heads, config.head_dim)
    q, k = rotate(q, config.rope_theta), rotate(k, config.rope_theta)
    out = np.zeros_like(q)
    for head in range(config.num_heads):
        kv = head // (config.num_heads // config.num_kv_heads)
        scores = q[:, head] @ k[:, kv].T / np.sqrt(config.head_dim)
        scores[np.triu_indices(steps, 1)] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = weights / weights.sum(axis=1, keepdims=True) @ v[:, kv]
    return out.reshape(steps, -1) @ w[f"{prefix}.o_proj.weight"].T


def mlp(x, w, prefix):
    gate = x @ w[f"{prefix}.gate_proj.weight"].T
    return (gate / (1 + np.exp(-gate)) * (x @ w[f"{prefix}.up_proj.weight"].T)) @ w[f"{prefix}.down_proj.weight"].T


def forward(tensors, config, tokens):
    """tokens [S] -> (hidden [U, S, H], gate logits [U, S], logits [U, S, V]), in float64."""
    w = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
    h = w["model.embed_tokens.weight"][tokens]
    hidden, gates = [], []
    for _ in range(config.loops):
        for layer in range(config.num_layers):
            name = f"model.layers.{layer}"

            def norm(x, which, name=name):
                return rms_norm(x, w[f"{name}.{which}.weight"], config.norm_eps)

            h = h + norm(attention(norm(h, "input_layernorm"), w, f"{name}.self_attn", config), "input_layernorm_2")
            h = h + norm(mlp(norm(h, "post_attention_layernorm"), w, f"{name}.mlp"), "post_attention_layernorm_2")
        h = rms_norm(h, w["model.norm.weight"], config.norm_eps)
        hidden.append(h)
        gates.append(h @ w["model.early_exit_gate.weight"][0] + w["model.early_exit_gate.bias"][0])
    hidden = np.stack(hidden)
    return hidden, np.stack(gates), hidden @ w["lm_head.weight"].T
