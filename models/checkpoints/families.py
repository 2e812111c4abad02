"""The models that have checkpoints, and how the parameters of each map to the tensors of a file."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from models.checkpoints import deepseek, llama, ouro
from models.checkpoints.errors import CheckpointError
from models.deepseek import Deepseek, DeepseekConfig
from models.llama import Llama, LlamaConfig
from models.ouro import Ouro, OuroConfig

Config = OuroConfig | LlamaConfig | DeepseekConfig
Model = Ouro | Llama | Deepseek
Read = Callable[[str], np.ndarray]
"""Gives a tensor by its Hugging Face name."""


class Family(NamedTuple):
    """One kind of model.

    `tensor_names(path, config)` gives one name, or one for each slice of a stacked parameter; `ignored(name, config)`
    tells which tensors of a file the model does without.
    """

    config: type
    model: Any
    config_from_json: Callable[[dict[str, Any]], Any]
    config_to_json: Callable[[Any], dict[str, Any]]
    tensor_names: Callable[[tuple[Any, ...], Any], str | list[str]]
    ignored: Callable[[str, Any], bool] = lambda name, config: False


FAMILIES = {
    "ouro": Family(OuroConfig, Ouro, ouro.config_from_json, ouro.config_to_json, ouro.tensor_names),
    "llama": Family(LlamaConfig, Llama, llama.config_from_json, llama.config_to_json, llama.tensor_names),
    **dict.fromkeys(
        deepseek.ARCHITECTURES,
        Family(
            DeepseekConfig,
            Deepseek,
            deepseek.config_from_json,
            deepseek.config_to_json,
            deepseek.tensor_names,
            deepseek.ignored,
        ),
    ),
}
"""By `model_type` of `config.json`."""


def family_of(config: Config) -> Family:
    """The family that a configuration belongs to."""
    return next(family for family in FAMILIES.values() if isinstance(config, family.config))


def config_from_json(data: dict[str, Any]) -> Config:
    """The configuration in Hugging Face field names; `model_type` says which model, Ouro where it is absent.

    Raises CheckpointError for a model or a field that is not computed here.
    """
    kind = data.get("model_type", "ouro")
    if kind not in FAMILIES:
        raise CheckpointError(f"config.json says model_type = {kind!r} (supported: {', '.join(map(repr, FAMILIES))})")
    return FAMILIES[kind].config_from_json(data)


def config_to_json(config: Config) -> dict[str, Any]:
    """The fields of `config.json`, in Hugging Face names."""
    return family_of(config).config_to_json(config)


def abstract_model(config: Config, **options: Any) -> Model:
    """The model with shapes for parameters; allocates nothing."""
    return nnx.eval_shape(lambda: family_of(config).model(config, rngs=nnx.Rngs(0), **options))


def expected_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint and its shape; allocates nothing."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path, leaf in nnx.to_flat_state(nnx.state(abstract_model(config), nnx.Param)):
        names = family_of(config).tensor_names(path, config)
        if isinstance(names, str):
            shapes[names] = leaf.shape
        else:
            shapes |= dict.fromkeys(names, leaf.shape[1:])
    return shapes


def filled(model: Model, read: Read) -> Model:
    """The abstract model with the parameters that `read` gives, in the dtypes that it asks for."""
    config = model.config
    graph, state = nnx.split(model)
    loaded = []
    for path, leaf in nnx.to_flat_state(state):
        names = family_of(config).tensor_names(path, config)
        if isinstance(names, str):
            values = jnp.asarray(read(names), leaf.dtype)
        else:  # rounded one by one: the host never holds all layers in a wider dtype
            values = jnp.asarray(np.stack([np.asarray(read(name)).astype(leaf.dtype) for name in names]))
        loaded.append((path, leaf.replace(values)))
    return nnx.merge(graph, nnx.from_flat_state(loaded))


def tensors_of(model: Model, dtype: Any = None) -> dict[str, np.ndarray]:
    """The model's parameters as the tensors of a checkpoint, in `dtype`, by default as they are."""
    tensors: dict[str, np.ndarray] = {}
    for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param)):
        names = family_of(model.config).tensor_names(path, model.config)
        values = np.asarray(leaf[...] if dtype is None else leaf[...].astype(dtype))
        tensors |= {names: values} if isinstance(names, str) else dict(zip(names, values))
    return tensors


def default_dtype() -> Any:
    """Of activations: float32 on a CPU, bfloat16 elsewhere."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
