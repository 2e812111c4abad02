"""Training of the shipped models: `python -m models.train --text .data --out DIR`, or `train(config, ...)` from Python.

Writes into DIR: model.safetensors and config.json (bfloat16), metrics.json, curves.png, README.md (the model card),
log.txt, and while it runs the folder `checkpoint`, from which `--resume` continues. SIGTERM, Ctrl-C and the end of
`--minutes` all stop cleanly: the model is written and evaluated.

On a GPU use XLA_FLAGS=--xla_gpu_enable_triton_gemm=false (shorter compilation); the command line adds it.
"""

import collections
import concurrent.futures
import contextlib
import json
import os
import pathlib
import shutil
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import nnx

from models import checkpoints
from models.ouro import OuroConfig
from models.training import corpora, families, model_card, optimizers, quality
from models.training.batches import Request, Workers
from models.training.latent_recipes import deepseek_smoke, deepseek_tiny
from models.training.progress import Progress
from models.training.recipes import VARIANTS, TrainConfig, ouro_tiny, smoke

__all__ = ["PRESETS", "VARIANTS", "TrainConfig", "main", "ouro_tiny", "smoke", "train"]

PRESETS: dict[str, Callable[..., TrainConfig]] = {
    "ouro-tiny": ouro_tiny,
    "smoke": smoke,
    "deepseek-tiny": deepseek_tiny,
    "deepseek-smoke": deepseek_smoke,
}

IN_FLIGHT = 4
"""Steps that may wait on the device: enough to keep it busy, few enough that the clock tells the truth."""


class State:
    """What a run carries from step to step, and everything that a checkpoint holds."""

    COUNTERS = ("step", "tokens", "seconds", "history")

    def __init__(self, params, optimizer_state):
        self.params, self.optimizer_state = params, optimizer_state
        self.step = self.tokens = 0
        self.seconds = 0.0  # of training, up to the last checkpoint or the end of the loop
        self.history: list[dict[str, Any]] = []

    def save(self, folder: pathlib.Path, fingerprint: dict[str, Any]) -> None:
        """Write a checkpoint; an older one stays until the new one is complete."""
        folder.mkdir(parents=True, exist_ok=True)
        leaves = jax.device_get(jax.tree.leaves((self.params, self.optimizer_state)))
        meta = {name: getattr(self, name) for name in self.COUNTERS} | {"fingerprint": fingerprint}
        partial = folder / "state.partial.npz"
        np.savez(partial, *leaves, meta=np.frombuffer(json.dumps(meta).encode(), np.uint8))
        os.replace(partial, folder / "state.npz")

    def load(self, folder: pathlib.Path, fingerprint: dict[str, Any]) -> None:
        """Continue from a checkpoint. Raises ValueError when it belongs to another configuration."""
        with np.load(folder / "state.npz") as data:
            meta = json.loads(bytes(data["meta"]))
            differing = {
                key
                for key in meta["fingerprint"] | fingerprint
                if json.dumps(meta["fingerprint"].get(key)) != json.dumps(fingerprint.get(key))
            }
            if differing:
                raise ValueError(f"the checkpoint in {folder} was made with another {', '.join(sorted(differing))}")
            leaves, tree = jax.tree.flatten((self.params, self.optimizer_state))
            loaded = [jnp.asarray(data[f"arr_{i}"], leaf.dtype) for i, leaf in enumerate(leaves)]
        self.params, self.optimizer_state = jax.tree.unflatten(tree, loaded)
        for name in self.COUNTERS:
            setattr(self, name, meta[name])


def build(config: TrainConfig) -> families.Model:
    """The model to train: float32 parameters, or the weights of `start_from` in float32."""
    on_gpu = jax.default_backend() == "gpu"
    options: dict[str, Any] = {
        "dtype": jnp.dtype(config.dtype),
        "param_dtype": jnp.float32,
        "attention": "cudnn" if on_gpu and config.dtype != "float32" else None,
    }
    if isinstance(config.model, OuroConfig):
        options["embedding"] = "one_hot" if on_gpu else "gather"
    if config.start_from is None:
        return families.of(config.model).fresh(config.model, config.seed, **options)
    found = checkpoints.read_config(checkpoints.resolve(config.start_from))
    if found != config.model:
        raise ValueError(f"{config.start_from} holds {found}, the run is for {config.model}")
    _, model = checkpoints.load(config.start_from, **options)
    assert isinstance(model, families.Model)
    return model


def make_step(config: TrainConfig, graph, optimizer: optax.GradientTransformation):
    """The jitted step.

    (params, optimiser state, tokens, labels, rate, index, stage) -> (params, state, LossParts, norm).

    A parameter that does not learn in the stage stays as it is.
    """
    family = families.of(config.model)

    def step(params, optimizer_state, tokens, labels, rate, index, stage):
        key = jax.random.fold_in(jax.random.key(config.seed), index)

        def learning(path) -> bool:
            return family.learns(path, stage)

        def loss(params):
            used = jax.tree_util.tree_map_with_path(
                lambda path, p: p if learning(path) else jax.lax.stop_gradient(p), params
            )
            return family.loss(nnx.merge(graph, used), tokens, labels, key, config.objective, stage)

        (_, parts), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
        sound = jnp.isfinite(norm)  # a step with a broken gradient changes nothing
        updates, new_state = optimizer.update(gradients, optimizer_state, params)
        new_params = jax.tree_util.tree_map_with_path(
            lambda path, p, u: jnp.where(sound, p - rate * u, p) if learning(path) else p, params, updates
        )
        new_state = jax.tree.map(lambda new, old: jnp.where(sound, new, old), new_state, optimizer_state)
        return new_params, new_state, parts, norm

    return jax.jit(step, donate_argnums=(0, 1), static_argnames="stage")


class Run:
    """One training run: the compiled functions, the clock, and the loop."""

    def __init__(self, config: TrainConfig, folder: pathlib.Path, texts: pathlib.Path, progress: Progress):
        self.config, self.folder, self.texts, self.progress = config, folder, texts, progress
        self.corpora = corpora.load(texts)
        model = build(config)
        self.graph, params = nnx.split(model)
        self.optimizer = optimizers.muon_adamw(momentum=config.momentum, decay=config.weight_decay, clip=config.clip)
        self.state = State(params, self.optimizer.init(params))
        self.step = make_step(config, self.graph, self.optimizer)
        self.scorer = quality.Scorer(model, config.evaluation_tokens)
        self.compiled: dict[tuple[int, str], Any] = {}  # by length and stage
        self.started = time.monotonic()
        self.stopped = False

    def compile(self) -> None:
        """Compile every shape at once: tracing one by one, XLA in threads."""
        began = time.monotonic()
        state = self.state
        scalar = jax.ShapeDtypeStruct((), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32)
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            jobs: dict[Any, tuple[dict[Any, Any], Any]] = {}
            for length, stage, rows in self.config.shapes:
                batch = jax.ShapeDtypeStruct((rows, length), jnp.int16), jax.ShapeDtypeStruct((rows, length), jnp.uint8)
                lowered = self.step.lower(state.params, state.optimizer_state, *batch, *scalar, stage=stage)
                jobs[pool.submit(lowered.compile)] = self.compiled, (length, stage)
            for length in sorted({*self.config.evaluation_lengths, *self.quick_lengths()}):
                jobs[pool.submit(self.scorer.lower(length).compile)] = self.scorer.compiled, length
            for job in concurrent.futures.as_completed(jobs):
                table, key = jobs[job]
                table[key] = job.result()
        self.progress.say(f"compiled {len(jobs)} shapes in {time.monotonic() - began:.0f} s")

    def seconds(self) -> float:
        """Seconds of training, earlier parts of a resumed run included."""
        return time.monotonic() - self.started

    def fraction(self, step: int) -> float:
        """Share of the run that is over before this step."""
        if self.config.minutes is not None:
            return self.seconds() / (60 * self.config.minutes)
        return step / (self.config.steps or 1)

    def request(self, index: int) -> Request:
        """What step `index` trains on."""
        phase = self.config.phase(self.fraction(index))
        lengths, shares = zip(*phase.lengths)
        length = int(np.random.default_rng((self.config.seed, index, 1)).choice(lengths, p=shares))
        return Request(index, length, self.config.rows(length, phase), phase.mixture, phase.stage)

    def loop(self, workers: Workers) -> None:
        """Train until the steps or the time are over or `stopped` is set."""
        config, state = self.config, self.state
        waiting: collections.deque = collections.deque()
        asked = state.step
        self.started = time.monotonic() - state.seconds
        self.progress.begin()
        next_look = self.fraction(asked) + 1 / max(config.quick_evaluations, 1)
        while not self.stopped and (fraction := self.fraction(state.step)) < 1:
            while asked < state.step + max(1, 2 * len(workers.processes)):
                workers.ask(self.request(asked))
                asked += 1
            batch = workers.take()
            rate = self.rate(fraction, state.step)
            compiled = self.compiled[batch.request.length, batch.request.stage]
            state.params, state.optimizer_state, parts, norm = compiled(
                state.params, state.optimizer_state, batch.tokens, batch.labels, np.float32(rate), np.int32(state.step)
            )
            state.step += 1
            state.tokens += batch.tokens.size
            waiting.append(parts.loss)
            if len(waiting) > IN_FLIGHT:
                jax.block_until_ready(waiting.popleft())
            self.progress.step(state.step, self.seconds(), fraction, batch.tokens.shape, rate, parts, norm)
            if config.quick_evaluations and fraction >= next_look:
                next_look += 1 / config.quick_evaluations
                self.look(fraction)
            if state.step % config.checkpoint_every == 0:
                state.seconds = self.seconds()
                state.save(self.folder / "checkpoint", config.fingerprint())
        jax.block_until_ready(state.params)
        state.seconds = self.seconds()
        self.progress.flush(state.step, state.seconds)

    def rate(self, fraction: float, step: int) -> float:
        """Learning rate of a step."""
        c = self.config
        return optimizers.rate_at(
            fraction, step, peak=c.rate, warmup=c.warmup, decay_from=c.decay_from, last=c.last_rate
        )

    def quick_lengths(self) -> tuple[int, ...]:
        """Lengths that `look` scores: a short and a long one."""
        lengths = self.config.evaluation_lengths
        return (lengths[0], lengths[min(2, len(lengths) - 1)])

    def look(self, fraction: float) -> None:
        """A quick evaluation of the present weights, for the log and the curves."""
        short, long = self.quick_lengths()
        self.scorer.params = self.state.params
        held_out = {name: corpus.held_out for name, corpus in self.corpora.items()}
        filler = list(held_out.values())
        seen: dict[str, Any] = {"step": self.state.step, "seconds": round(self.seconds(), 1), "fraction": fraction}
        for name, data in held_out.items():
            seen[f"{name} {long}"] = quality.text(self.scorer, data, long, limit=16).ce
        chains = [(f"chain{hops}", length) for hops, length in ((1, short), (2, short), (4, short), (4, long))]
        for name, length in [("keys4", long), *chains]:
            if name in self.config.evaluation_tasks:
                seen[f"{name} {length}"] = quality.task(self.scorer, name, length, filler, count=32).exact
        self.state.history.append(seen)
        self.progress.look(seen)

    def finish(self) -> dict[str, Any]:
        """Write the model, then evaluate exactly what was written, then write metrics, curves and card."""
        config, state = self.config, self.state
        rounded = jax.tree.map(lambda p: p.astype(jnp.bfloat16), state.params)
        checkpoints.save(self.folder, nnx.merge(self.graph, rounded))
        self.progress.say(f"wrote {self.folder / 'model.safetensors'}")
        metrics: dict[str, Any] = {
            "name": config.name,
            "command": config.command(),
            "steps": state.step,
            "seconds": round(state.seconds, 1),
            "tokens": state.tokens,
            "parameters": sum(leaf.size for leaf in jax.tree.leaves(state.params)),
            "device": str(jax.devices()[0].device_kind),
            "jax": jax.__version__,
            "config": config.fingerprint(),
            "history": state.history,
            "training": self.progress.records,
        }
        model_card.write_json(self.folder / "metrics.json", metrics)
        began = time.monotonic()
        self.scorer.params = jax.tree.map(lambda p: p.astype(jnp.float32), rounded)
        result = quality.report(
            self.scorer,
            {name: corpus.held_out for name, corpus in self.corpora.items()},
            names=config.evaluation_tasks,
            lengths=config.evaluation_lengths,
            count=config.evaluation_count,
        )
        metrics |= result | {"gates": families.of(config.model).gates(result)}
        model_card.write_json(self.folder / "metrics.json", metrics)
        for line in model_card.tables(metrics):
            self.progress.say(line)
        self.progress.say(f"evaluated in {time.monotonic() - began:.0f} s")
        model_card.write(self.folder, metrics)
        return metrics


def train(
    config: TrainConfig,
    *,
    texts: str | pathlib.Path,
    out: str | pathlib.Path,
    resume: bool = False,
    keep_checkpoint: bool = False,
) -> dict[str, Any]:
    """Train, write everything into `out`, and return the metrics.

    texts is the folder that `python -m models.training.corpora` fills. With `resume`, continues from `out`/checkpoint
    where there is one; the result of a run counted in steps is the same as without the interruption.
    """
    out, texts = pathlib.Path(out), pathlib.Path(texts)
    out.mkdir(parents=True, exist_ok=True)
    with Progress(out / "log.txt", append=resume) as progress:
        run = Run(config, out, texts, progress)
        progress.say(f"{config.name} on {jax.devices()[0].device_kind}, JAX {jax.__version__}")
        if resume and (out / "checkpoint" / "state.npz").is_file():
            run.state.load(out / "checkpoint", config.fingerprint())
            progress.say(f"continues at step {run.state.step}")
        with Workers(texts, config.seed, config.workers) as workers, stopping(run):
            run.compile()
            run.loop(workers)
        if keep_checkpoint:
            run.state.save(out / "checkpoint", config.fingerprint())
        metrics = run.finish()
        if not keep_checkpoint:
            shutil.rmtree(out / "checkpoint", ignore_errors=True)
    return metrics


@contextlib.contextmanager
def stopping(run: Run):
    """SIGTERM and the first Ctrl-C end the loop in an orderly way; a second Ctrl-C interrupts."""

    def stop(number, frame):
        del frame
        if run.stopped and number == signal.SIGINT:
            raise KeyboardInterrupt
        run.stopped = True

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; whoever runs us elsewhere sets `stopped`
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main() -> None:
    """The entry of `python -m models.train`, which is `sparse-jax train` under another name."""
    from models.cli import train as command  # late: that command imports this file

    typer.run(command)


if __name__ == "__main__":
    main()
