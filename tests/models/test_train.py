"""Training: the objective, the optimiser, batches from processes, resuming, stopping."""

import dataclasses
import json
import os
import signal
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import checkpoints, tasks, train
from models.ouro import Ouro, OuroConfig
from models.training import batches, corpora, latent_objective, objective, optimizers, quality
from models.training.recipes import Phase

SMALL = OuroConfig.tiny(
    hidden_size=32,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    loops=2,
    max_positions=128,
)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """A folder with two short texts."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "kjv.txt").write_bytes(corpora.excerpt().tobytes() * 2)
    (folder / "jargon.txt").write_bytes(corpora.excerpt().tobytes()[::-1])
    return folder


def small_run(**changes) -> train.TrainConfig:
    """A run whose step compiles in a few seconds."""
    settings = {
        "model": SMALL,
        "objective": objective.Objective(shares=(0.4, 0.6)),
        "phases": (Phase(1.0, ((64, 1.0),), tasks.Mixture(max_hops=1, max_keys=1)),),
        "tokens_per_step": 256,
        "evaluation_lengths": (64,),
        "evaluation_tasks": (),
        "steps": 6,
    }
    return train.smoke(**(settings | changes))


# The objective


def model_and_batch():
    model = Ouro(SMALL, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(0)
    tokens = jnp.asarray(rng.integers(0, 256, (2, 16)), jnp.int16)
    labels = rng.permutation(np.arange(32) % (tasks.BEHIND + 10)).reshape(2, 16)  # every label twice
    labels = jnp.asarray(labels, jnp.uint8).at[:, 1].set(tasks.FILLER)
    return model, tokens, labels


def test_objective_equals_the_written_equation():
    model, tokens, labels = model_and_batch()
    goal = objective.Objective(shares=(1.0, 3.0))
    total, parts = objective.loss(model, tokens, labels, jax.random.key(0), goal)
    out = model.forward(tokens.astype(jnp.int32))
    tokens, labels = np.asarray(tokens), np.asarray(labels)
    logits = np.asarray(model.logits(out.hidden), np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    log_p = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    leave = 1 / (1 + np.exp(-np.asarray(out.gate_logits[0], np.float64)))
    weighted = weights = 0.0
    for b in range(2):
        for s in range(15):
            label = labels[b, s + 1]
            target = tokens[b, s + 1] if label < tasks.BEHIND else ord(str(label - tasks.BEHIND))
            ce = -log_p[:, b, s, target]
            p = np.array([leave[b, s], 1 - leave[b, s]])
            loss = 0.8 * (p @ ce) + 0.2 * (0.25 * ce[0] + 0.75 * ce[1]) + 0.1 * (p @ np.log(p))
            weight = goal.label_weights[min(label, tasks.BEHIND)]
            weighted, weights = weighted + weight * loss, weights + weight
    np.testing.assert_allclose(total, weighted / weights, rtol=1e-5)
    assert parts.ce.shape == parts.exits.shape == (4, 2)
    np.testing.assert_allclose(parts.exits.sum(axis=1), 1.0, rtol=1e-5)


def test_label_weights_are_as_documented():
    weights = objective.Objective().label_weights
    assert len(weights) == tasks.BEHIND + 1
    assert weights[tasks.UNKNOWN] == 0
    assert weights[tasks.TEXT] == 1
    assert weights[tasks.ANSWER] == 4


def test_bytes_first_stated_at_random_have_no_loss():
    model, tokens, labels = model_and_batch()
    labels = labels.at[:, -1].set(tasks.UNKNOWN)  # the last byte is a target and nothing else
    goal = objective.Objective(shares=(1.0, 1.0))
    losses = [
        objective.loss(model, tokens.at[:, -1].set(byte), labels, jax.random.key(0), goal)[0] for byte in (1, 200)
    ]
    assert losses[0] == losses[1]


def test_dropout_is_for_text_alone():
    def losses(label):
        seen = []
        for seed in range(2):
            model, tokens, _ = model_and_batch()
            labels = jnp.full(tokens.shape, label, jnp.uint8)
            goal = objective.Objective(shares=(1.0, 1.0), dropout=0.3)
            seen.append(float(objective.loss(model, tokens, labels, jax.random.key(seed), goal)[0]))
        return seen

    first, second = losses(tasks.FILLER)
    assert first == second
    first, second = losses(tasks.TEXT)
    assert first != second


def test_dropout_is_a_share_below_all():
    for kind in (objective.Objective, latent_objective.LatentObjective):
        for rate in (-0.1, 1.0, float("nan")):
            with pytest.raises(ValueError, match=f"dropout must be at least 0 and below 1, got {rate}"):
                kind(dropout=rate)
    layer = types.SimpleNamespace(branch=lambda x: x)
    like = jax.ShapeDtypeStruct((1, 2, 512), jnp.float32)
    objective.drop_branches([layer], ("branch",), jax.random.key(0), jnp.ones(1, bool), like, 0.999)
    assert set(np.unique(layer.branch(jnp.ones(like.shape)))) == {0, 256}


# The optimiser


def test_orthogonalize_moves_singular_values_to_one():
    matrices = jax.random.normal(jax.random.key(0), (3, 8, 24)) * jnp.array([1e-3, 1.0, 50.0])[:, None, None]
    values = jnp.linalg.svd(optimizers.orthogonalize(matrices).astype(jnp.float32), compute_uv=False)
    assert (values > 0.5).all()
    assert (values < 1.4).all()


def test_muon_treats_a_matrix_and_its_transpose_alike():
    wide = jax.random.normal(jax.random.key(1), (4, 9))
    muon = optimizers.scale_by_muon()
    params = {"wide": wide, "tall": wide.T, "other": wide + 1}
    updates, _ = muon.update(params, muon.init(params))
    np.testing.assert_array_equal(updates["wide"], updates["tall"].T)
    rms = float(jnp.sqrt(jnp.mean(updates["wide"] ** 2)))
    assert 0.1 < rms < 0.3  # the size of an AdamW update


def test_only_the_matrices_of_layers_go_through_muon():
    params = nnx.state(Ouro(SMALL, rngs=nnx.Rngs(0)))
    paths = jax.tree_util.tree_leaves_with_path(params)
    chosen = [jax.tree_util.keystr(path) for path, leaf in paths if optimizers.is_layer_matrix(path, leaf)]
    assert len(chosen) == 7 * SMALL.num_layers
    assert all("proj" in path for path in chosen)


def test_rate_warms_up_and_comes_down():
    def rate(fraction, step):
        return optimizers.rate_at(fraction, step, peak=2.0, warmup=10, decay_from=0.6, last=0.1)

    np.testing.assert_allclose([rate(0, 0), rate(0.3, 9), rate(0.6, 99)], [0.2, 2.0, 2.0])
    np.testing.assert_allclose([rate(0.8, 99), rate(1.0, 99), rate(1.5, 99)], [1.1, 0.2, 0.2])


# Batches


def test_workers_make_the_same_batches_as_one_process(texts):
    mixture = tasks.Mixture(max_hops=3)
    requests = [batches.Request(index, length, 3, mixture) for index, length in enumerate((64, 128, 256, 64, 128))]
    here = batches.Maker(texts, seed=5)
    with batches.Workers(texts, 5, 2) as workers:
        processes = workers.processes
        for request in requests:
            workers.ask(request)
        for request in requests:
            batch, expected = workers.take(), here(request)
            assert batch.request == request
            np.testing.assert_array_equal(batch.tokens, expected.tokens)
            np.testing.assert_array_equal(batch.labels, expected.labels)
        workers.ask(batches.Request(5, 4096, 200, mixture))  # nobody waits for it
    assert all(process.returncode is not None for process in processes)


def test_a_dead_worker_is_an_error_and_no_hang(tmp_path, texts, capfd):
    with batches.Workers(tmp_path / "nothing", 0, 1) as workers:
        workers.ask(batches.Request(0, 64, 1, tasks.Mixture()))
        with pytest.raises(RuntimeError, match="worker"):
            workers.take()
    assert "kjv.txt is missing" in capfd.readouterr().err


# Runs


def test_smoke_training_learns(texts, tmp_path):
    phases = (Phase(1.0, ((128, 1.0),), tasks.Mixture(max_hops=2, max_keys=2)),)
    config = train.smoke(phases=phases, evaluation_lengths=(128,), evaluation_tasks=("passkey",), quick_evaluations=2)
    metrics = train.train(config, texts=texts, out=tmp_path)
    assert metrics["steps"] == 20
    assert metrics["tokens"] == 20 * 512
    assert metrics["text"]["kjv"]["128"]["ce"][-1] < np.log(264) - 0.7  # it begins at or above log(264)
    assert len(metrics["history"]) == 1
    assert {path.name for path in tmp_path.iterdir()} >= {"model.safetensors", "metrics.json", "README.md", "log.txt"}
    assert json.loads((tmp_path / "metrics.json").read_text())["text"]["kjv"]["128"]["bytes"] > 0
    assert "passkey" in (tmp_path / "README.md").read_text()
    loaded, model = checkpoints.load(tmp_path, dtype=jnp.float32)
    assert dataclasses.replace(loaded, init=config.model.init) == config.model
    score = quality.Scorer(model, config.evaluation_tokens)
    again = quality.text(score, corpora.load(texts)["kjv"].held_out, 128)
    np.testing.assert_allclose(again.ce, metrics["text"]["kjv"]["128"]["ce"], atol=2e-4)


def test_resumed_run_ends_with_the_same_bits(texts, tmp_path, monkeypatch):
    config = small_run(checkpoint_every=4)
    train.train(config, texts=texts, out=tmp_path / "whole")
    save = train.State.save

    def save_and_break(self, *arguments):
        save(self, *arguments)
        raise ConnectionError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(train.State, "save", save_and_break)
        with pytest.raises(ConnectionError):
            train.train(config, texts=texts, out=tmp_path / "parts")
    with pytest.raises(ValueError, match="another seed"):
        train.train(dataclasses.replace(config, seed=1), texts=texts, out=tmp_path / "parts", resume=True)
    metrics = train.train(config, texts=texts, out=tmp_path / "parts", resume=True)
    assert metrics["steps"] == 6
    assert metrics["tokens"] == 6 * 256
    whole, parts = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("whole", "parts"))
    assert whole == parts
    assert not (tmp_path / "parts" / "checkpoint").exists()


def test_a_signal_stops_a_run_in_an_orderly_way(texts, tmp_path, monkeypatch):
    note = train.Progress.step

    def note_and_signal(self, step, *arguments):
        note(self, step, *arguments)
        if step == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(train.Progress, "step", note_and_signal)
    before = signal.getsignal(signal.SIGTERM)
    metrics = train.train(small_run(steps=None, minutes=60.0), texts=texts, out=tmp_path)
    assert metrics["steps"] in (2, 3)
    assert (tmp_path / "model.safetensors").is_file()
    assert signal.getsignal(signal.SIGTERM) is before


def test_configuration_says_what_is_wrong():
    with pytest.raises(ValueError, match="either steps or minutes"):
        small_run(minutes=1.0)
    with pytest.raises(ValueError, match="128 positions"):
        small_run(phases=(Phase(1.0, ((256, 1.0),), tasks.Mixture()),))
    with pytest.raises(ValueError, match="last until 1"):
        small_run(phases=(Phase(0.5, ((64, 1.0),), tasks.Mixture()),))
    with pytest.raises(ValueError, match="no variant"):
        train.ouro_tiny("deeper")


@pytest.mark.parametrize("variant", train.VARIANTS)
def test_every_variant_fits_the_promises(variant):
    config = train.ouro_tiny(variant)
    shapes = jax.tree.leaves(nnx.eval_shape(lambda: nnx.state(Ouro(config.model, rngs=nnx.Rngs(0)))))
    assert 3e6 <= sum(leaf.size for leaf in shapes) <= 5e6
    assert set(quality.LENGTHS) - {1024} <= set(config.lengths)
    assert (config.model.num_heads, config.model.num_kv_heads, config.model.head_dim) == (4, 2, 64)
