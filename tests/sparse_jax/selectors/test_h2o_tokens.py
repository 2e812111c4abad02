"""H2O that selects tokens: `h2o` at any page size and the two token-level flows, step by step against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import paging, selectors
from tests.h2o_setting import DECAY, probabilities

SINKS, RECENT, K = 2, 3, 5
BUDGET = SINKS + RECENT + K
STEPS, START, WIDTH, HEADS = 6, 9, 8, 2  # the window passes k within these steps, T23
FLOWS = {"h2o_token_sparse_attention": "mean", "gqa_h2o_token_sparse_attention": "max"}


class Requests:
    """Two requests that grow token by token: pages in any order, and plain arrays beside them."""

    def __init__(self, selector, *, page_size, group, requests=2, seed=0):
        self.selector, self.group = selector, group
        rng = np.random.default_rng(seed)
        tokens = START + STEPS
        self.keys, self.values = rng.standard_normal((2, requests, tokens, HEADS, WIDTH)).astype(np.float32)
        self.queries = 2 * rng.standard_normal((STEPS, requests, HEADS * group, WIDTH)).astype(np.float32)
        width = -(-tokens // page_size)
        self.table = rng.permutation(requests * width + 1)[: requests * width].reshape(requests, width).astype(np.int32)
        at = self.table[:, np.arange(tokens) // page_size], slice(None), np.arange(tokens) % page_size
        self.pools = []
        for x in (self.keys, self.values):
            pool = np.zeros((requests * width + 1, HEADS, page_size, WIDTH), np.float32)
            pool[at] = x
            self.pools.append(jnp.asarray(pool))
        self.state = selector.init(paging.PagedKV(*(pool[None] for pool in self.pools)), requests)
        self.step = jax.jit(selector.attend)

    def view(self, length):
        lengths = jnp.full(len(self.table), length, jnp.int32)
        return paging.PageView(jnp.asarray(self.table), lengths, jnp.int32(0))

    def run(self):
        """Yields (length, query, what attend returned) of each step."""
        for step in range(STEPS):
            length = START + step + 1
            attended = self.step(self.state, jnp.asarray(self.queries[step]), *self.pools, self.view(length))
            self.state = attended.state
            yield length, self.queries[step].reshape(-1, HEADS, self.group, WIDTH), attended


def check(requests, rule):
    h = np.zeros((2, HEADS, START + STEPS))
    for length, q, attended in requests.run():
        for b, head in np.ndindex(2, HEADS):
            keys, values = (x[b, :length, head].astype(np.float64) for x in (requests.keys, requests.values))
            first, end = SINKS, length - RECENT
            chosen = np.arange(length)
            if end - first > K:
                p = probabilities(q[b, head], keys[first:end], WIDTH**-0.5, rule)
                h[b, head, first:end] = p + DECAY * h[b, head, first:end]
                best = first + np.argsort(-h[b, head, first:end], kind="stable")[:K]
                chosen = np.sort(np.concatenate([chosen[:first], best, chosen[end:]]))
            positions = np.asarray(attended.positions[b, head])
            assert positions[positions >= 0].tolist() == chosen.tolist(), (length, b, head)
            assert int(attended.tokens_read[b, head]) == len(chosen)
            for g in range(requests.group):
                p = probabilities(q[b, head, g : g + 1], keys[chosen], WIDTH**-0.5)
                out = np.asarray(attended.output.out[b]).reshape(HEADS, requests.group, WIDTH)[head, g]
                np.testing.assert_allclose(out, p @ values[chosen], rtol=1e-4, atol=1e-5)
    sums = np.asarray(selectors.h2o.of_tokens(requests.state, jnp.asarray(requests.table)))
    np.testing.assert_allclose(sums[:, :, : START + STEPS], h, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    ("page_size", "group", "rule"),
    [(1, 3, "mean"), (16, 1, "max"), (16, 4, "mean"), (16, 7, "max"), (64, 5, "max"), (64, 6, "mean"), (4, 8, "max")],
)
def test_h2o_at_any_page_size_step_by_step(page_size, group, rule):
    selector = selectors.get("h2o", budget=BUDGET, sinks=SINKS, recent=RECENT, group=rule)
    check(Requests(selector, page_size=page_size, group=group), rule)


@pytest.mark.parametrize("name", FLOWS)
@pytest.mark.parametrize("group", [1, 3, 4, 5, 6, 7, 8])
def test_T1_the_token_flows_step_by_step(name, group):
    check(
        Requests(selectors.get(name, budget=BUDGET, sinks=SINKS, recent=RECENT), page_size=1, group=group), FLOWS[name]
    )


def test_the_comparison_notices_another_rule():
    """Mutation: the mean of the queries where the rule is the largest probability."""
    selector = selectors.get("h2o", budget=BUDGET, sinks=SINKS, recent=RECENT, group="mean")
    with pytest.raises(AssertionError):
        check(Requests(selector, page_size=4, group=4), "max")


@pytest.mark.parametrize("name", FLOWS)
def test_T2_token_flows_refuse_larger_pages_and_name_the_page_flow(name):
    kv = paging.PagedKV(jnp.zeros((1, 3, 2, 16, 8)), jnp.zeros((1, 3, 2, 16, 8)))
    message = (
        rf"{name} works on pages of one token, got pages of 16; {name.replace('_token', '')} is its page-level flow"
    )
    with pytest.raises(ValueError, match=message):
        selectors.get(name).init(kv)
    view = paging.PageView(jnp.zeros((1, 3), jnp.int32), jnp.array([40]), jnp.int32(0))
    with pytest.raises(ValueError, match=message):
        selectors.get(name).attend(jnp.zeros((3, 2, 16)), jnp.ones((1, 4, 8)), kv.k[0], kv.v[0], view)


def test_T19_a_page_that_changes_hands_carries_no_sums_over():
    selector = selectors.get("h2o_token_sparse_attention", budget=BUDGET, sinks=SINKS, recent=RECENT)
    requests = Requests(selector, page_size=1, group=3)
    list(requests.run())
    assert int(jnp.sum(requests.state > 0)) > 0  # before
    sizes = dict(planes=1, pages=20, page_size=1, kv_heads=HEADS, key_width=WIDTH, requests=1, pages_per_request=20)
    paged, k = paging.create(**sizes), jnp.ones((1, 15, HEADS, WIDTH))
    state = jnp.zeros((20, HEADS, 1)).at[:15].set(requests.state[:15] + 1)  # as another request left it

    @jax.jit
    def change_hands(paged, state):
        paged, state, room = selector.reserve(paged, state, jnp.array([15]), 15)
        paged, state, _ = selector.store(paged, state, jnp.int32(0), room, k, k)
        return paging.view(paged, jnp.int32(0)), state

    view, state = change_hands(paged, state)
    assert not np.asarray(selectors.h2o.of_tokens(state, view.page_table[:, :15])).any()


def test_T21_the_same_bits_again():
    def run():
        requests = Requests(selectors.get("h2o", budget=BUDGET, sinks=SINKS, recent=RECENT), page_size=4, group=3)
        return [(np.asarray(a.output.out), np.asarray(a.positions)) for *_, a in requests.run()]

    for first, second in zip(run(), run()):
        np.testing.assert_array_equal(first[0], second[0])
        np.testing.assert_array_equal(first[1], second[1])
        assert first[1].dtype == np.int32


def test_copies_take_the_sums_along():
    """PREFIX-1."""
    selector = selectors.get("h2o")
    state = jnp.arange(24.0).reshape(6, 1, 4)
    copied = selector.copy(state, jnp.array([1, -1, 3, 9]), jnp.array([4, 2, -1, 5]))
    np.testing.assert_array_equal(copied, state.at[4].set(state[1]))


def test_sharing_is_refused():
    sizes = dict(planes=1, pages=4, page_size=4, kv_heads=1, key_width=4, requests=2, pages_per_request=2)
    request = jnp.int32(0), jnp.int32(1), jnp.int32(4)
    with pytest.raises(ValueError, match="H2O keeps scores or positions of one request beside each page"):
        selectors.share(selectors.get("h2o"), paging.create(**sizes), *request)
    selectors.share(selectors.get("quest"), paging.create(**sizes), *request)


def test_several_query_rows_are_refused():
    requests = Requests(selectors.get("h2o"), page_size=4, group=1)
    with pytest.raises(ValueError, match=r"one query token of each request a step.*got \[2, 3, 2, 8\]"):
        requests.selector.attend(requests.state, jnp.ones((2, 3, 2, 8)), *requests.pools, requests.view(9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group": "sum"}, "H2O: group must be one of"),
        ({"state_dtype": "float16"}, "H2O: state_dtype must be one of"),
        ({"scale": float("nan")}, "H2O: scale is a finite number"),
        ({"scale": "x"}, "H2O: scale is a finite number"),
        ({"scale": True}, "H2O: scale is a finite number"),
        ({"decay": 0}, "H2O: decay is above 0 and at most 1; got 0"),
        ({"budgets": 3}, "Selector 'h2o' has no option 'budgets'; its options: form, budget"),
        ({"form": "evicting"}, "h2o: form must be one of 'select', 'evict'"),
        ({"form": "evict", "group": "max"}, "Selector 'h2o' has no option 'group'"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        selectors.get("h2o", **options)


def test_the_oracle_retains_the_most():
    """No choice of as many tokens per KV head has more of the group's mean mass."""
    requests = Requests(selectors.get("oracle", budget=BUDGET), page_size=4, group=3)
    *_, (length, q, attended) = requests.run()
    for b, head in np.ndindex(2, HEADS):
        keys = requests.keys[b, :length, head]
        p = np.mean([probabilities(q[b, head, g : g + 1], keys, WIDTH**-0.5) for g in range(3)], axis=0)
        chosen = np.asarray(attended.positions[b, head])
        assert chosen.tolist() == np.sort(np.argsort(-p, kind="stable")[:BUDGET]).tolist()


def flat_cache(size, width=4, seed=0):
    """One request in pages of one token, in the order of the pool, all its keys random."""
    keys, values = np.random.default_rng(seed).standard_normal((2, size, 1, 1, width)).astype(np.float32)
    view = paging.PageView(jnp.arange(size, dtype=jnp.int32)[None], jnp.array([size], jnp.int32), jnp.int32(0))
    return jnp.asarray(keys), jnp.asarray(values), view


def test_T29_selection_among_more_than_32767_pages():
    size, q = 33_000, jnp.ones((1, 2, 4))
    keys, values, view = flat_cache(size)
    flow = selectors.get("gqa_h2o_token_sparse_attention", budget=40)
    attended = flow.attend(jnp.zeros((size, 1, 1)), q, keys, values, view)
    p = probabilities(np.ones((2, 4)), np.asarray(keys[4 : size - 5, 0, 0]), 0.5, "max")
    best = np.sort(4 + np.argsort(-p, kind="stable")[:31])
    assert attended.positions[0, 0].tolist() == [*range(4), *best, *range(size - 5, size)]
    page_flow = selectors.get("h2o_sparse_attention", budget=40)
    state = page_flow.write(page_flow.init(paging.PagedKV(keys[None], values[None])), keys[:, 0], jnp.arange(size))
    read = np.asarray(page_flow.attend(state, q, keys, values, view).positions[0, 0])
    best = np.sort(4 + np.argsort(-np.asarray(keys[4 : size - 5, 0, 0]).sum(axis=1), kind="stable")[:31])
    assert np.sort(read[read >= 0]).tolist() == [*range(4), *best, *range(size - 5, size)]


def test_contract_1_ids_past_the_pool_are_absent():
    """Nothing of page 0, which is another request's, decides; no token of an absent page is counted."""
    keys, values, view = flat_cache(16, width=8)
    keys, values = (x.reshape(4, 1, 4, 8) for x in (keys, values))
    view = paging.PageView(jnp.array([[1, 99, 2, 3]], jnp.int32), view.lengths, view.stale)
    for selector in (selectors.get("h2o", budget=6, sinks=1, recent=1), selectors.get("oracle", budget=6)):
        states = [jnp.zeros((4, 1, 4)).at[0].set(other) for other in (0.0, 5.0, jnp.nan)]
        found = [selector.attend(state, jnp.ones((1, 2, 8)), keys, values, view) for state in states]
        for attended in found:
            positions = attended.positions[0, 0]
            assert positions.tolist() == found[0].positions[0, 0].tolist()
            assert not any(4 <= position < 8 for position in positions.tolist())
            assert int(attended.tokens_read[0, 0]) == 6
    assert int(selectors.get("dense").attend((), jnp.ones((1, 2, 8)), keys, values, view).tokens_read[0, 0]) == 12


@pytest.mark.parametrize("name", ["h2o", "oracle"])
def test_the_attention_has_the_scale_of_the_selector(name):
    keys, values, view = flat_cache(16)
    state, q = jnp.zeros((16, 1, 1)), jnp.ones((1, 2, 4))
    attended = selectors.get(name, budget=16, scale=2.0).attend(state, q, keys, values, view)
    expected = selectors.get("dense").attend((), q, keys, values, view, scale=2.0)
    np.testing.assert_allclose(attended.output.out, expected.output.out, rtol=1e-5)
    for option in ({"scale": 2.0}, {"soft_cap": 5.0}, {"k_scale": jnp.float32(2)}):
        with pytest.raises(ValueError, match=f"ranks by plain scores.*got {next(iter(option))} for the attention"):
            selectors.get(name).attend(state, q, keys, values, view, **option)
