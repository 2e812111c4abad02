"""Decoding with reference correction once more, in NumPy alone: one token, layer and head at a time, in float64."""

import dataclasses
import math

import numpy as np

from tests.models.numpy_ouro import mlp, rms_norm, rotate


@dataclasses.dataclass
class Kept:
    """The reference of one query head."""

    ids: list[int]
    mass: float
    output: np.ndarray
    contribution: np.ndarray


def softmax(scores):
    weights = np.exp(scores - np.max(scores))
    return weights / weights.sum()


def captured(q, keys, values, retention):
    """The dense output of q [D] over keys [n, D], and its reference."""
    p = softmax(keys @ q / math.sqrt(len(q)))
    count = min(len(p), max(1, math.ceil(len(p) * retention)))
    ids = sorted(np.argsort(-p, kind="stable")[:count].tolist())
    return p @ values, Kept(ids, p[ids].sum(), p @ values, p[ids] @ values[ids])


def corrected(q, keys, values, kept):
    """Attention of a later loop over its own keys [n, D], corrected from a reference."""
    p = softmax(keys[kept.ids] @ q / math.sqrt(len(q)))
    return kept.output + kept.mass * (p @ values[kept.ids]) - kept.contribution


def best_pages(q, keys, count, page_size):
    """Token ids of the newest page and the `count - 1` best others by Quest's bound for a KV head: q [G, D]."""
    pages = [range(first, min(first + page_size, len(keys))) for first in range(0, len(keys), page_size)]
    boxes = [(keys[list(page)].min(axis=0), keys[list(page)].max(axis=0)) for page in pages]
    bounds = np.array([[np.maximum(head * lo, head * hi).sum() for lo, hi in boxes] for head in q])
    share = np.log([softmax(row / math.sqrt(q.shape[1])) for row in bounds]).max(axis=0)
    share[-1] = np.inf
    return sorted(token for page in np.argsort(-share, kind="stable")[:count] for token in pages[page])


class Decoder:
    """One request, token by token. pages: how many pages of 4 tokens loops before the capture read; None is all."""

    def __init__(self, tensors, config, retention, capture_loops, pages=None):
        self.w = {name: np.asarray(tensor, np.float64) for name, tensor in tensors.items()}
        self.config, self.retention, self.capture_loops, self.pages = config, retention, capture_loops, pages
        self.keys = [[] for _ in range(config.planes)]
        self.values = [[] for _ in range(config.planes)]
        self.masses = []  # of each corrected token, [layers, Hq], at its last capture

    def step(self, token, correct):
        """Logits [U, V] after the next token."""
        c, w, position = self.config, self.w, len(self.keys[0])
        h, kept, logits = w["model.embed_tokens.weight"][token], {}, []
        for loop in range(c.loops):
            for layer in range(c.num_layers):
                name = f"model.layers.{layer}"

                def norm(x, which, name=name):
                    return rms_norm(x, w[f"{name}.{which}.weight"], c.norm_eps)

                x = norm(h, "input_layernorm")
                mixed = self.attention(x, f"{name}.self_attn", loop, layer, position, kept if correct else None)
                h = h + norm(mixed, "input_layernorm_2")
                h = h + norm(mlp(norm(h, "post_attention_layernorm"), w, f"{name}.mlp"), "post_attention_layernorm_2")
            h = rms_norm(h, w["model.norm.weight"], c.norm_eps)
            logits.append(h @ w["lm_head.weight"].T)
        if correct:
            heads = range(c.num_heads)
            self.masses.append([[kept[layer, head].mass for head in heads] for layer in range(c.num_layers)])
        return np.stack(logits)

    def attention(self, x, prefix, loop, layer, position, kept):
        c, plane = self.config, loop * self.config.num_layers + layer

        def heads(which, count, turn=True):
            y = (x @ self.w[f"{prefix}.{which}_proj.weight"].T).reshape(count, c.head_dim)
            # Turned as the last of a sequence of which only the last is wanted.
            return rotate(np.broadcast_to(y, (position + 1, *y.shape)), c.rope_theta)[-1] if turn else y

        q = heads("q", c.num_heads)
        self.keys[plane].append(heads("k", c.num_kv_heads))
        self.values[plane].append(heads("v", c.num_kv_heads, turn=False))
        keys, values = np.array(self.keys[plane]), np.array(self.values[plane])
        group, out = c.num_heads // c.num_kv_heads, np.empty_like(q)
        for head in range(c.num_heads):
            kv = head // group
            k, v = keys[:, kv], values[:, kv]
            if kept is None or loop in self.capture_loops:
                out[head], reference = captured(q[head], k, v, self.retention)
                if kept is not None:
                    kept[layer, head] = reference
            elif loop < self.capture_loops[0]:
                chosen = list(range(len(k)))
                if self.pages is not None:
                    chosen = best_pages(q[kv * group : (kv + 1) * group], k, self.pages, 4)
                out[head] = captured(q[head], k[chosen], v[chosen], 1.0)[0]
            else:
                out[head] = corrected(q[head], k, v, kept[layer, head])
        return self.w[f"{prefix}.o_proj.weight"] @ out.reshape(-1)
