"""Reading a `config.json` in Hugging Face field names: what every family of models asks of it."""

from typing import Any

from models.checkpoints.errors import CheckpointError

NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def require_fields(data: dict[str, Any], names: tuple[str, ...] = NEEDED) -> None:
    """Raise CheckpointError that names the fields which are not there."""
    if missing := [name for name in names if data.get(name) is None]:
        raise CheckpointError(f"config.json lacks {', '.join(missing)}")


def rope_fields(data: dict[str, Any]) -> dict[str, Any]:
    """The newer nested form of the rotary fields, empty where the file has the older one."""
    return data.get("rope_parameters") or {}


def refuse_other_computations(model: str, data: dict[str, Any], allowed: dict[str, tuple[Any, ...]]) -> None:
    """Each field that would change the computation must say what this model does; else CheckpointError names it."""
    wrong = [
        f"{key} = {data[key]!r} (supported: {', '.join(map(repr, values))})"
        for key, values in allowed.items()
        if key in data and data[key] not in values
    ]
    rope = rope_fields(data)
    if rope.get("rope_type", "default") != "default":
        wrong.append(f"rope_parameters.rope_type = {rope['rope_type']!r} (supported: 'default')")
    if other := set(data.get("layer_types") or ()) - {"full_attention"}:
        wrong.append(f"layer_types = {sorted(other)} (supported: full_attention)")
    if wrong:
        raise CheckpointError(f"config.json asks for what this {model} does not compute: " + "; ".join(wrong))


def stop_ids(data: dict[str, Any]) -> set[int]:
    """`eos_token_id`, which is a number, a list or nothing."""
    eos = data.get("eos_token_id")
    return {eos} if isinstance(eos, int) else set(eos or ())


def common_sizes(data: dict[str, Any], *, theta: float, eps: float, positions: int) -> dict[str, Any]:
    """The sizes that the configurations of all families share, under this project's names."""
    heads = data["num_attention_heads"]
    return {
        "vocab_size": data["vocab_size"],
        "hidden_size": data["hidden_size"],
        "intermediate_size": data["intermediate_size"],
        "num_layers": data["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": data.get("num_key_value_heads") or heads,
        "head_dim": data.get("head_dim") or data["hidden_size"] // heads,
        "rope_theta": float(rope_fields(data).get("rope_theta", data.get("rope_theta", theta))),
        "norm_eps": data.get("rms_norm_eps", eps),
        "max_positions": data.get("max_position_embeddings", positions),
        "bos_id": data.get("bos_token_id"),
    }


def common_json(config: Any) -> dict[str, Any]:
    """The fields of `config.json` that all families write."""
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_positions,
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.stop_ids),
    }
