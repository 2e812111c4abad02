"""`python -m sparse_jax.bench`: the benchmark without the models."""

import typer

from sparse_jax.bench.command import bench

if __name__ == "__main__":
    typer.run(bench)
