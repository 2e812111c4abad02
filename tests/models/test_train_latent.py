"""Training of DeepSeek-style models: attention of its stages, the objective, what learns when, resuming."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import sparse_jax
from models import checkpoints, tasks, train
from models.deepseek import Deepseek
from models.training import corpora, latent_attends, latent_objective, optimizers
from models.training.latent_recipes import TINY
from models.training.recipes import Phase
from tests.models.deepseek_setting import small_deepseek

CONFIG = small_deepseek(mtp_layers=1, num_layers=2, vocab_size=264)


@pytest.fixture(scope="module")
def model():
    return Deepseek(CONFIG, rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def tokens():
    return jax.random.randint(jax.random.key(1), (2, 16), 0, 264)


# Attention of the stages


def test_best_is_top_k_with_earlier_ones_first_among_equals():
    rng = np.random.default_rng(0)
    scores = rng.integers(-3, 3, (2, 40, 40)).astype(np.float32) * np.where(rng.random((2, 40, 40)) < 0.5, 1, -1)
    seen = np.tril(np.ones((40, 40), bool))
    for k in (1, 5, 64):
        found = np.asarray(latent_attends.best(jnp.asarray(scores), jnp.asarray(seen), k))
        hidden = jnp.where(seen, jnp.where(scores == 0, 0.0, scores), -jnp.inf)
        ids = np.asarray(sparse_jax.top_k(hidden, min(k, 40), order="id"))
        expected = np.zeros_like(found)
        for b, s in np.ndindex(2, 40):
            expected[b, s, ids[b, s][ids[b, s] >= 0]] = True
        np.testing.assert_array_equal(found, expected)


def test_divergence_equals_numpy():
    rng = np.random.default_rng(1)
    mask = np.tril(np.ones((6, 6), bool))
    target = np.where(mask, rng.random((1, 6, 6)), 0)
    target /= target.sum(axis=-1, keepdims=True)
    scores = rng.standard_normal((1, 6, 6))
    q = np.where(mask, np.exp(scores), 0)
    q /= q.sum(axis=-1, keepdims=True)
    expected = np.where(mask, target * np.log(np.where(mask, target / np.where(mask, q, 1), 1)), 0).sum(axis=-1).mean()
    given = (jnp.asarray(x, jnp.float32) for x in (target, scores))
    np.testing.assert_allclose(latent_attends.divergence(*given, jnp.asarray(mask)), expected, rtol=1e-5)


def test_stages_read_as_the_model_itself_does(model, tokens):
    dense = dataclasses.replace(CONFIG, indexer=dataclasses.replace(CONFIG.indexer, topk=16))
    for stage, config in (("dense", dense), ("indexer", dense), ("sparse", CONFIG)):
        graph, params = nnx.split(model)
        same = Deepseek(config, rngs=nnx.Rngs(0))
        found = latent_objective.forward(nnx.merge(graph, params), tokens, stage)
        np.testing.assert_allclose(found.hidden, same.forward(tokens).hidden[0], atol=2e-5)
        positions = jnp.broadcast_to(jnp.arange(16, dtype=jnp.int32), tokens.shape)
        following = jnp.roll(tokens, -1, axis=1)
        further, _ = same.predict(found.hidden, following, positions, same.causal, ())
        np.testing.assert_allclose(found.further, further, atol=5e-5)
        assert len(found.divergences) == (0 if stage == "dense" else 3)


def test_a_layer_without_an_indexer_is_refused(tokens):
    shared = Deepseek(
        dataclasses.replace(CONFIG, indexer=dataclasses.replace(CONFIG.indexer, pattern="FS")), rngs=nnx.Rngs(0)
    )
    with pytest.raises(ValueError, match="an indexer in every layer"):
        latent_objective.forward(shared, tokens, "sparse")


# The objective


def loss_of(model, tokens, stage, params=None, **changes):
    graph, own = nnx.split(model)
    settings = latent_objective.LatentObjective(dropout=0.0, **changes)
    labels = jnp.full(tokens.shape, tasks.FILLER, jnp.uint8)
    fresh = nnx.merge(graph, own if params is None else params)
    return latent_objective.loss(fresh, tokens, labels, jax.random.key(0), settings, stage)


def test_loss_is_the_sum_of_its_parts(model, tokens):
    def ce(stage, field, ahead):
        hidden = getattr(latent_objective.forward(model, tokens, stage), field)
        log_p = np.asarray(jax.nn.log_softmax(model.logits(hidden)))[:, :-ahead]
        return -np.take_along_axis(log_p, np.asarray(tokens)[:, ahead:, None], axis=-1).mean()

    plain, parts = loss_of(model, tokens, "dense", extra=0.0)
    np.testing.assert_allclose(plain, ce("dense", "hidden", 1), rtol=1e-5)
    assert parts.exits is None
    with_extra, _ = loss_of(model, tokens, "dense", extra=0.5)
    np.testing.assert_allclose(with_extra - plain, 0.5 * ce("dense", "further", 2), rtol=1e-5)
    for stage, language in (("sparse", ce("sparse", "hidden", 1)), ("indexer", 0.0)):
        total, parts = loss_of(model, tokens, stage, extra=0.0)
        divergences = latent_objective.forward(model, tokens, stage).divergences
        np.testing.assert_allclose(total, language + sum(divergences), rtol=1e-5)
        np.testing.assert_allclose(parts.others["divergence"] * 3, sum(divergences), rtol=1e-5)


def test_language_model_and_indexer_learn_from_losses_of_their_own(model, tokens):
    params = nnx.state(model)

    def gradients(stage):
        found = jax.grad(lambda p: loss_of(model, tokens, stage, p)[0])(params)
        named = jax.tree_util.tree_leaves_with_path(found)
        sizes = {jax.tree_util.keystr(path): float(jnp.abs(leaf).max()) for path, leaf in named}
        of_indexer = [size for name, size in sizes.items() if "indexer" in name]
        others = [size for name, size in sizes.items() if "indexer" not in name]
        bias = [size for name, size in sizes.items() if "e_score_correction_bias" in name]
        return max(of_indexer), max(others), max(bias)

    assert gradients("dense")[0] == 0
    assert gradients("indexer")[0] > 0
    assert gradients("indexer")[1] == 0
    sparse = gradients("sparse")
    assert min(sparse) > 0
    np.testing.assert_allclose(sparse[2], 1e-5, rtol=1e-3)  # the router's bias: the amount alone


def test_muon_takes_stacks_of_matrices_apart():
    stack = jax.random.normal(jax.random.key(2), (3, 4, 9))
    muon = optimizers.scale_by_muon()
    together, _ = muon.update({"stack": stack}, muon.init({"stack": stack}))
    apart = {str(n): stack[n] for n in range(3)}
    single, _ = muon.update(apart, muon.init(apart))
    for n in range(3):
        np.testing.assert_array_equal(together["stack"][n], single[str(n)])


# Runs


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "kjv.txt").write_bytes(corpora.excerpt().tobytes() * 2)
    (folder / "jargon.txt").write_bytes(corpora.excerpt().tobytes()[::-1])
    return folder


@pytest.mark.slow
def test_a_run_goes_through_its_stages_and_can_be_resumed(texts, tmp_path, monkeypatch):
    config = train.deepseek_smoke(steps=12, checkpoint_every=1)
    kept = []
    save = train.State.save

    def save_and_keep(self, *arguments):
        save(self, *arguments)
        kept.append(
            {jax.tree_util.keystr(p): np.asarray(v) for p, v in jax.tree_util.tree_leaves_with_path(self.params)}
        )
        if len(kept) == 9:
            raise ConnectionError("power cut")

    monkeypatch.setattr(train.State, "save", save_and_keep)
    with pytest.raises(ConnectionError):
        train.train(config, texts=texts, out=tmp_path)
    metrics = train.train(config, texts=texts, out=tmp_path, resume=True)

    def changed(before, after):
        names = {name for name in kept[0] if not np.array_equal(kept[before][name], kept[after][name])}
        return {"indexer" in name for name in names}

    # 40 % of the steps dense, 30 % for the indexer, the rest sparse.
    assert (changed(0, 4), changed(4, 8), changed(8, 11)) == ({False}, {True}, {True, False})
    assert metrics["steps"] == 12
    assert metrics["training"][-1]["divergence"] > 0
    assert len(metrics["text"]["kjv"]["64"]["ce"]) == 2
    card = (tmp_path / "README.md").read_text()
    assert "only the indexer learns" in card
    assert "read densely / read by the indexer's choice of 16 tokens" in card
    assert checkpoints.read_config(tmp_path) == config.model
    checkpoints.locate(tmp_path, config.model)


def test_configuration_says_what_does_not_fit():
    with pytest.raises(ValueError, match="no objective of a DeepseekConfig"):
        train.smoke(model=TINY)
    phase = Phase(0.5, ((64, 1.0),), tasks.Mixture())
    with pytest.raises(ValueError, match="steps of the same size"):
        train.deepseek_smoke(phases=(phase, dataclasses.replace(phase, until=1.0, tokens=128)))


def test_the_shipped_size_is_small_enough():
    config = train.deepseek_tiny()
    shapes = jax.tree.leaves(nnx.eval_shape(lambda: nnx.state(Deepseek(config.model, rngs=nnx.Rngs(0)))))
    assert 2 * sum(leaf.size for leaf in shapes) < 12e6
    assert [phase.stage for phase in config.phases][-2:] == ["indexer", "sparse"]
