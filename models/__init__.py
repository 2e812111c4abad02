"""Flax NNX models that decode with `sparse_jax`: Ouro, its checkpoints, generation and training."""
