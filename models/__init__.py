"""Flax NNX models that decode with `sparse_jax`: Ouro, Llama, their checkpoints, generation, training, evaluation."""
