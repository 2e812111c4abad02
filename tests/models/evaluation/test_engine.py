"""The engine on a tiny model with random weights, which continues a text it does not know."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.deepseek import Deepseek
from models.evaluation import engine, methods, run
from models.evaluation.engine import Evaluation, Settings
from models.evaluation.methods import Method, parse
from models.evaluation.observed import Observed, watch
from models.evaluation.quick import filler
from models.evaluation.results import Results
from models.evaluation.tasks import Writer
from models.ouro import Ouro
from models.tokenizers import ByteTokenizer
from sparse_jax import paging, selectors
from tests.models.configs import small_ouro
from tests.models.deepseek_setting import small_deepseek

LENGTH, PROMPTS = 48, 3
QUEST, TOVA = "quest:page_size=4", "tova:page_size=4"


@pytest.fixture(autouse=True, scope="module")
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model():
    return Ouro(small_ouro(vocab_size=264, num_layers=1, loops=2), rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def writer():
    return Writer(ByteTokenizer(), text=filler())


def settings(*names, **changes):
    options = {"budgets": ("8", "16", "1/1"), "batch_tokens": 9 * LENGTH, "workers": 1, "prompts": PROMPTS} | changes
    chosen = tuple(parse(name) if isinstance(name, str) else name for name in names)
    return Settings(model="small", methods=chosen, tasks=("text",), lengths=(LENGTH,), **options)


@pytest.fixture(scope="module")
def evaluated(model, writer):
    """Dense, a selector that keeps all tokens and one that drops some, three budgets each."""
    evaluation = Evaluation(model, writer, settings("dense:page_size=4", QUEST, TOVA))
    evaluation.run()
    return evaluation


def cells(evaluation):
    return {(cell["method"].split(":")[0], cell["budget"]): cell for cell in evaluation.results}


def same(one, other, tolerance=1e-4):
    for name in ("exact", "margin", "nll", "read", "mass", "of_oracle", "recall", "error"):
        np.testing.assert_allclose(one[name], other[name], rtol=tolerance, atol=tolerance, err_msg=name)


def test_dense_equals_a_forward_pass(evaluated, model, writer):
    cell = cells(evaluated)["dense", None]
    nll, right, margins = [], [], []
    for prompt in writer.prompts("text", LENGTH, PROMPTS):
        tokens = np.concatenate([prompt.context, prompt.question, prompt.answer])
        logits = np.asarray(model.logits(model.forward(jnp.array(tokens)[None]).hidden[-1])[0], np.float64)
        first = len(prompt.context) + len(prompt.question)
        rows = logits[first - 1 : -1]
        own = rows[np.arange(len(rows)), tokens[first:]]
        others = np.where(np.arange(264) == tokens[first:, None], -np.inf, rows).max(axis=1)
        nll.append((np.log(np.exp(rows).sum(axis=1)) - own).mean())
        right.append((own > others).all())
        margins.append((own - others).min())
    np.testing.assert_allclose(cell["nll"][0], np.mean(nll), rtol=1e-3)
    np.testing.assert_allclose(cell["margins"], margins, rtol=1e-2)
    assert cell["exact"][0] == np.mean(right)


def test_dense_misses_nothing(evaluated):
    cell = cells(evaluated)["dense", None]
    for name in ("read", "mass", "of_oracle", "recall"):
        np.testing.assert_allclose(cell[name], [1, 1, 1], atol=1e-4)
    assert cell["error"][0] < 1e-5


def test_one_compilation_serves_all_budgets(evaluated):
    # The dense prefill; begin and advance of dense and quest; tova's own prefill and advance.
    assert evaluated.programs.compiled == 1 + 2 + 2 + 2
    assert len(evaluated.results.cells) == 1 + 3 + 3


def test_more_is_read_for_a_greater_budget_and_never_more_mass_than_the_oracle(evaluated):
    found = cells(evaluated)
    for method in ("quest", "tova"):
        small, large = found[method, "8"], found[method, "16"]
        assert small["read"][0] < large["read"][0] < 1
        assert small["mass"][0] < large["mass"][0] < 1
        for cell in (small, large):
            assert cell["of_oracle"][0] <= 1 + 1e-4
            assert cell["recall"][0] < 1
            assert cell["error"][0] > 1e-3
        # `read` is of a cache that grows from 32 to 47 tokens; whole pages of 4 may not be full.
        assert (8 - 4) / 48 < small["read"][0] <= 8 / 30


def test_a_method_that_may_hold_everything_equals_dense_attention(evaluated):
    """Its positions and the shadow cache are true: else the diagnosis would find something."""
    found = cells(evaluated)
    same(found["tova", "1/1"], found["dense", None])


@dataclasses.dataclass(frozen=True)
class Fixed(Method):
    """A method whose budget is a number that the compiler knows."""

    tokens: int = 8

    def at(self, budget, most):
        return dataclasses.replace(self.selector, budget=self.tokens)


@dataclasses.dataclass(frozen=True)
class OnItsOwn(Method):
    """A method that prefills for itself, although it need not."""

    @property
    def keeps_all(self):
        return False


def test_traced_budgets_and_shared_prefill_change_nothing(evaluated, model, writer):
    quest = parse(QUEST)
    fixed = Fixed("fixed", quest.selector, 4)
    own = OnItsOwn("own", quest.selector, 4)
    # Two prompts a batch and one budget at a time, besides.
    evaluation = Evaluation(model, writer, settings(fixed, own, budgets=("8",), batch_tokens=2 * LENGTH))
    assert evaluation.shape(own, LENGTH).rows == 2
    evaluation.run()
    for name in ("fixed", "own"):
        same(cells(evaluation)[name, "8"], cells(evaluated)["quest", "8"])


def test_first_layers_can_read_everything():
    paged = paging.create(planes=2, pages=6, page_size=4, kv_heads=2, key_width=8, requests=1, pages_per_request=6)
    k, v = jax.random.normal(jax.random.key(0), (2, 2, 1, 22, 2, 8))
    paged, _ = jax.jit(paging.append)(paged, k, v, jnp.array([22]))
    q = jax.random.normal(jax.random.key(1), (1, 1, 4, 8))
    flat, state = paging.flat(paged.kv), watch((), paged.kv, 1, 4, 24)
    dense, observed = selectors.get("dense"), Observed(inner=selectors.get("window", budget=8), dense_planes=1)

    @functools.partial(jax.jit, static_argnums=0)
    def attend(selector, state, plane):
        return selector.attend(state, q, *flat, paging.view(paged, plane), plane=plane)

    for plane, tokens in ((0, 22), (1, 6)):
        attended = attend(observed, state, jnp.int32(plane))
        everything = attend(dense, (), jnp.int32(plane)).output.out
        assert np.allclose(attended.output.out, everything, rtol=1e-5) == (plane == 0)
        assert attended.tokens_read.tolist() == [[tokens] * 2]
        seen = attended.state.seen
        assert seen.read[plane].sum(axis=-1).tolist() == [[tokens] * 2]
        assert not seen.read[1 - plane].any()
        np.testing.assert_array_equal(seen.q[plane], q)


def test_a_cache_of_eight_bits(evaluated, model, writer):
    """Attention is what it should be over the rounded cache, which every method and its shadow have."""
    names = "dense:page_size=4", QUEST, TOVA
    evaluation = Evaluation(model, writer, settings(*names, budgets=("16",), cache_dtype="float8_e4m3fn"))
    evaluation.run()
    found, plain = cells(evaluation), cells(evaluated)
    assert all(cell["settings"]["cache_dtype"] == "float8_e4m3fn" for cell in found.values())
    assert not any("cache_dtype" in cell["settings"] for cell in plain.values())
    assert found["dense", None]["error"][0] < 0.01
    for name, cell in found.items():
        assert cell["margins"] != plain[name]["margins"]
        np.testing.assert_allclose(cell["nll"], plain[name]["nll"], atol=0.1)
        np.testing.assert_allclose(cell["mass"], plain[name]["mass"], atol=0.1)
    own = Evaluation(model, writer, settings(QUEST, cache_dtype="float32"))
    assert [cell["settings"] for cell in own.cells()] == [plain["quest", "8"]["settings"]] * 3


def test_requests_of_latent_attention_are_not_taken_apart():
    graph, params = nnx.split(Deepseek(small_deepseek(num_layers=1, experts=None), rngs=nnx.Rngs(0)))
    shape = run.Shape(length=16, rows=2, page_size=16, most=1, attention_rows=1, diagnostics=False)
    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32), jax.ShapeDtypeStruct((2,), jnp.int32)
    with pytest.raises(ValueError, match="leave out attention_rows, got 1"):
        run.prefill.lower(params, *tokens, graph=graph, shape=shape)


def test_known_cells_are_not_run_again(evaluated, model, writer, tmp_path):
    path = tmp_path / "results.json"
    evaluated.results.save(path)
    again = Evaluation(model, writer, settings("dense:page_size=4", QUEST, TOVA), Results(path))
    assert again.cells() == []
    again.run(lambda cell: pytest.fail(str(cell)))
    assert again.programs.compiled == 0
    assert len(Evaluation(model, writer, settings(QUEST, prompts=4), Results(path)).cells()) == 3
    assert len(Evaluation(model, writer, settings(QUEST, budgets=("8", "12")), Results(path)).cells()) == 1


def test_a_method_that_fails_stops_no_other(model, writer, monkeypatch):
    evaluation = Evaluation(model, writer, settings("h2o", QUEST))
    done = []

    def cells(method, task, length, budgets, on_cell):
        if method.name == "h2o":
            raise NotImplementedError("no such kernel")
        done.append(method.name)

    monkeypatch.setattr(evaluation, "_cells", cells)
    monkeypatch.setattr(evaluation, "compile_ahead", lambda: None)
    with pytest.raises(engine.Failed, match="h2o at 48 tokens: NotImplementedError: no such kernel"):
        evaluation.run()
    assert done == [QUEST]


# Parts


def test_rows_of_a_batch():
    assert engine.rows_of(64, 5, 1024) == 320  # everything at once
    assert engine.rows_of(64, 5, 200) == 192  # three budgets, then two
    assert engine.rows_of(64, 4, 200) == 128  # two and two, rather than three and one
    assert engine.rows_of(64, 5, 64) == 64
    assert engine.rows_of(64, 5, 63) == 32  # two even halves
    assert engine.rows_of(3, 5, 0) == 1


def test_budgets():
    assert [engine.budget_tokens(text, 512) for text in ("1/64", "0.1", "1.0", "7", "9999")] == [8, 52, 512, 7, 512]
    for wrong in ("0", "-1", "3/2", "1.5", "many", "1/0", "", "0.0"):
        with pytest.raises(ValueError, match="such as 1/64"):
            engine.budget_tokens(wrong, 512)


def test_methods_by_name():
    quest = parse("quest:page_size=32:sinks=0:recent=5")
    assert (quest.page_size, quest.selector.sinks, quest.selector.recent) == (32, 0, 5)
    assert parse("h2o:group=max").selector.group == "max"
    assert parse("h2o_token_sparse_attention").page_size == 1
    assert parse("quest").keeps_all
    assert not parse("tova").keeps_all
    assert not parse("dense").takes_budget
    for wrong, message in (
        ("nothing", "Unknown selector"),
        ("quest:budget=3", "for all"),
        ("quest:sinks", "name:option"),
    ):
        with pytest.raises(ValueError, match=message):
            parse(wrong)
    assert {"dense", "oracle", "random", "quest"} <= set(methods.default("ouro-tiny"))


def test_what_cannot_be_run_is_refused():
    with pytest.raises(ValueError, match="prompts must be at least 1"):
        settings(QUEST, prompts=0)
    with pytest.raises(ValueError, match="methods must not be empty"):
        settings()
