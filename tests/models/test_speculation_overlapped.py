"""Overlapped rounds: the host one round behind the device, two leases of references at once."""

import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import speculation_overlapped
from models.decode import DecodeOptions
from models.executables import compilations
from models.ouro import Ouro
from models.reference import ReferenceCorrection
from models.sampling import Sampling
from models.speculation import Speculation, speculate_chunk
from models.speculation_overlapped import Overlapped, Report, overlapped_round
from pallas_kernels.lowering import lower_for_cuda
from sparse_jax import paging, reference_store, selectors
from tests.models.speculation_setting import CONFIG, assert_same_text, plain, prompts, speculate, start

REQUESTS, TOKENS = 16, 20
STOP = (7, 11, 30, 41)
OPTIONS = DecodeOptions(
    selector=selectors.get("quest", budget=64), stop_ids=STOP, reference=ReferenceCorrection(retention=0.3)
)
SPECULATION = Speculation(drafts=3, draft_loops=2)


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model() -> Ouro:
    return Ouro(CONFIG, rngs=nnx.Rngs(3))


@pytest.fixture(scope="module")
def expected(model):
    """What the synchronous rounds give, of prompts of which some stop early."""
    with jax.default_matmul_precision("highest"):
        tokens, _, _ = speculate(model, new(model), SPECULATION, OPTIONS)
    assert len({len(text) for text in tokens}) > 2
    return tokens


def new(model, seed=0, limits=TOKENS):
    return start(model, prompts(seed, REQUESTS), limits, OPTIONS)


def nothing_is_held(rounds):
    pool, store = rounds.state.paged.pool, rounds.held.store
    assert int(pool.free_count) == rounds.state.paged.kv.pages
    assert int(store.pool.free_count) == store.slots
    assert int(store.pool.holders.sum()) == int(pool.holders.sum()) == 0
    assert rounds.stale == 0


@pytest.fixture
def order(monkeypatch):
    """What the host did, in order: rounds it dispatched and rounds it read."""
    done: list[str] = []
    for name in ("_start", "_read"):
        plain = getattr(Overlapped, name)

        def spied(self, name=name, plain=plain):
            done.append(name)
            return plain(self)

        monkeypatch.setattr(Overlapped, name, spied)
    return done


def test_the_tokens_are_those_of_synchronous_rounds_and_nothing_is_held_in_the_end(model, expected, order):
    rounds = Overlapped(model, new(model), OPTIONS, SPECULATION)
    told: list[list[int]] = [[] for _ in range(REQUESTS)]
    for new_tokens in rounds:
        for text, more in zip(told, new_tokens):
            text += more
    assert told == rounds.tokens == expected
    nothing_is_held(rounds)
    # Round n + 1 is under way before round n is read.
    assert order[:4] == ["_start", "_start", "_read", "_start"]
    assert order.count("_start") == order.count("_read")
    assert 0 < rounds.accepted < rounds.drafted
    assert rounds.rounds < sum(map(len, expected))


def test_two_rounds_hold_different_slots_and_the_older_goes_one_round_later(model):
    rounds = Overlapped(model, new(model), OPTIONS, SPECULATION)
    leases = []
    for _ in range(5):
        rounds._start()
        lease, pool = jax.device_get((rounds.held.lease, rounds.held.store.pool))
        leases.append(lease)
        running = ~np.asarray(rounds.state.done)
        assert (lease.slots[running] >= 0).all()
        assert len(set(lease.slots[lease.slots >= 0].tolist())) == (lease.slots >= 0).sum()
        # All of this round are live, and none of the one before.
        assert (pool.incarnation[lease.slots[running]] == lease.incarnations[running]).all()
        assert (pool.holders[lease.slots[running]] == 1).all()
        assert int(pool.free_count) == len(pool.holders) - (lease.slots >= 0).sum()
    for older, newer in itertools.pairwise(leases):
        assert not set(older.slots.ravel().tolist()) & set(newer.slots[newer.slots >= 0].tolist())
        # Tokens that take the places of rejected ones have leases of their own; plans of the older ones are stale.
        plan, stale = reference_store.plan(rounds.held.store, jax.tree.map(jnp.asarray, older), reference_store.CONSUME)
        assert int(stale) == (older.slots >= 0).sum() > 0
        np.testing.assert_array_equal(plan.modes, reference_store.ABSENT)
    list(rounds)
    nothing_is_held(rounds)


def test_rejected_rows_cannot_be_read_and_the_root_survives(model):
    rounds = Overlapped(model, new(model), OPTIONS, SPECULATION)
    rounds._start()
    numbers, lease, count = jax.device_get((rounds._flying[0], rounds.held.lease, rounds.held.store.references.count))
    report = Report.unpacked(numbers)
    stays = np.arange(4) <= np.maximum(report.accepted, 0)[:, None]
    live = (count[np.maximum(lease.slots, 0)] > 0).all(axis=-1) & (lease.slots >= 0)
    took_part = report.accepted >= 0
    np.testing.assert_array_equal(live[took_part], stays[took_part])


def test_a_cancelled_request_costs_the_round_under_way_and_gives_everything_back(model, expected):
    rounds = Overlapped(model, new(model), OPTIONS, SPECULATION)
    before = None
    for count, _ in enumerate(rounds):
        if count == 1:
            rounds.cancel(range(0, REQUESTS, 2))
            before = [list(text) for text in rounds.tokens]
            assert len(rounds._flying) == 1  # they take part in this one
    assert before is not None
    for b in range(REQUESTS):
        assert rounds.tokens[b] == (before[b] if b % 2 == 0 else expected[b])
    nothing_is_held(rounds)


def test_a_row_is_used_again_while_the_round_of_its_last_request_is_under_way(model, expected):
    """The same row at once: the new request gets its own text, and none of what the old round brings."""
    rounds = Overlapped(model, new(model), OPTIONS, SPECULATION)
    for count, _ in enumerate(rounds):
        if count == 1:
            break
    again = prompts(0, REQUESTS)
    rounds.submit({0: again[3], 2: again[5]}, TOKENS)
    list(rounds)
    first = {request: new(model).tokens[request] for request in (3, 5)}
    for row, request in ((0, 3), (2, 5)):
        assert rounds.tokens[row] == [int(first[request])] + expected[request]
    assert [rounds.tokens[b] for b in (1, 3, 4)] == [expected[b] for b in (1, 3, 4)]
    nothing_is_held(rounds)


def test_what_is_stale_when_a_row_is_used_again_is_counted(model):
    rounds = Overlapped(model, new(model), OPTIONS, SPECULATION)
    next(iter(rounds))
    table = rounds.state.paged.table
    held = int((table.pages[2] >= 0).sum())
    stale = dataclasses.replace(table, incarnations=table.incarnations.at[2].add(1))
    rounds.state = dataclasses.replace(rounds.state, paged=dataclasses.replace(rounds.state.paged, table=stale))
    before = rounds.stale
    rounds.submit({2: [1, 2]}, TOKENS)
    assert rounds.stale - before == held > 0


def test_a_submission_without_room_fails_and_leaves_the_others_as_they_are(model, expected):
    """Two requests run and need ten pages more at most; that is all there are, and the prompt needs 16."""
    state = start(model, [text if b < 2 else [] for b, text in enumerate(prompts(0, REQUESTS))], TOKENS, OPTIONS)
    pool = dataclasses.replace(state.paged.pool, free_count=jnp.int32(10))
    state = dataclasses.replace(state, paged=dataclasses.replace(state.paged, pool=pool))
    rounds = Overlapped(model, state, OPTIONS, SPECULATION)
    next(iter(rounds))
    with pytest.raises(paging.OutOfPages, match=r"requests \[4\]"):
        rounds.submit({4: [1] * 61}, 4)
    list(rounds)
    assert rounds.tokens == [text if b < 2 else [] for b, text in enumerate(expected)]
    assert int(rounds.state.paged.pool.holders.sum()) == 0
    assert int(rounds.held.store.pool.free_count) == rounds.held.store.slots


def test_a_submission_that_cannot_work_is_refused_before_anything_changes(model, expected):
    rounds = Overlapped(model, new(model), OPTIONS, SPECULATION)
    next(iter(rounds))
    good, last = [1, 2], REQUESTS - 1
    for wrong, limit, message in (
        ({}, 4, "no prompts"),
        ({-1: good}, 4, f"rows of prompts must be from 0 to {last}, got -1"),
        ({0: good, REQUESTS: good}, 4, f"rows of prompts must be from 0 to {last}, got {REQUESTS}"),
        ({True: good}, 4, "rows of prompts must be from 0 to .*, got True"),
        ({0: good}, 0, "limit must be at least 1, got 0"),
        ({0: good}, 1.5, "limit must be an integer known on the host, got 1.5"),
        ({0: good, 3: []}, 4, "prompt 3 is empty"),
        ({0: good, 3: [1, 999]}, 4, r"prompt 3 holds the ids \[999\]; the vocabulary is 0 \.\. 63"),
        ({3: [1, -1]}, 4, r"prompt 3 holds the ids \[-1\]"),
        ({3: [1, 0.5]}, 4, "ids of prompt 3 must be an integer known on the host, got 0.5"),
        ({3: good}, CONFIG.max_positions, f"passes the {CONFIG.max_positions} positions"),
        ({0: good, 3: [1] * 60}, 6, "prompt 3 has 60 tokens; with a limit of 6 it holds 65, .* room for 64"),
    ):
        with pytest.raises(ValueError, match=message):
            rounds.submit(wrong, limit)
    for numbers, got in (([0, -1], -1), ([0, REQUESTS], REQUESTS), ([True] * REQUESTS, True)):
        with pytest.raises(ValueError, match=f"requests must be from 0 to {last}, got {got}"):
            rounds.cancel(numbers)
    list(rounds)
    assert rounds.tokens == expected
    nothing_is_held(rounds)


def test_rows_that_never_started_have_ended(model, expected):
    texts = prompts(0, REQUESTS)
    rounds = Overlapped(model, start(model, [[] for _ in texts], TOKENS, OPTIONS), OPTIONS, SPECULATION)
    assert next(iter(rounds), None) is None
    state = start(model, [text if b % 2 else [] for b, text in enumerate(texts)], TOKENS, OPTIONS)
    some = Overlapped(model, state, OPTIONS, SPECULATION)
    assert sum(1 for _ in itertools.islice(some, 3 * TOKENS)) < 3 * TOKENS
    assert some.tokens == [text if b % 2 else [] for b, text in enumerate(expected)]
    for ended in (rounds, some):
        nothing_is_held(ended)


def test_references_grow_before_a_round_that_needs_more_room(model, expected):
    rounds = Overlapped(model, new(model), OPTIONS, SPECULATION, initial_capacity=10)
    seen = [rounds.held.store.capacity]
    for _ in rounds:
        seen.append(rounds.held.store.capacity)
    assert seen[1] == 10
    assert seen[-1] == 20  # of the 64 tokens of a table
    assert sorted(set(seen)) == [10, 20]
    assert seen == sorted(seen)
    assert rounds.tokens == expected
    nothing_is_held(rounds)


def test_references_have_room_for_a_long_prompt_that_is_submitted(model):
    texts, long = [], np.random.default_rng(2).integers(0, CONFIG.vocab_size, 40).tolist()
    for sizes in ({}, {"initial_capacity": 10}):
        state = start(model, [[] for _ in range(REQUESTS)], TOKENS, OPTIONS)
        rounds = Overlapped(model, state, OPTIONS, SPECULATION, **sizes)
        rounds.submit({np.int64(3): np.array(long)}, 6)
        list(rounds)
        texts.append(rounds.tokens[3])
        assert rounds.held.store.capacity == 20
        nothing_is_held(rounds)
    assert len(texts[0]) > 2
    assert texts[0] == texts[1]


def test_references_without_room_are_refused_when_the_rounds_are_made(model):
    state = new(model)
    for sizes, message in (
        ({"memory_limit": 10_000}, r"memory_limit of 10000 bytes is too small: 128 slots .* at capacity 20"),
        ({"capacity": 19}, "capacity must be at least 20 .*got 19"),
        ({"initial_capacity": 21}, "initial_capacity must be at most the capacity, got 21 and 20"),
    ):
        with pytest.raises(ValueError, match=message):
            Overlapped(model, state, OPTIONS, SPECULATION, **sizes)
        with pytest.raises(ValueError, match=f"{next(iter(sizes))}: .*options.reference is None"):
            Overlapped(model, state, dataclasses.replace(OPTIONS, reference=None), SPECULATION, **sizes)
    assert not state.paged.kv.k.is_deleted()


@pytest.mark.slow
def test_without_references_the_text_is_that_of_plain_decoding_and_no_pool_is_copied(model):
    options = dataclasses.replace(OPTIONS, reference=None)
    texts, state = prompts(0, REQUESTS), start(model, prompts(0, REQUESTS), TOKENS, options, pages=4096)
    expected, _ = plain(model, state, TOKENS, options)
    static = {"graph": nnx.split(model)[0], "options": options, "speculation": SPECULATION}
    arguments = nnx.split(model)[1], state, None, jnp.zeros(REQUESTS, bool)
    memory = speculation_overlapped.dispatch.lower(*arguments, **static).compile().memory_analysis()
    statistics = sum(leaf.nbytes for leaf in jax.tree.leaves(state.selector))
    assert memory.temp_size_in_bytes < 1.2 * statistics + state.paged.kv.k.nbytes // 8
    rounds = Overlapped(model, state, options, SPECULATION)
    list(rounds)
    assert rounds.held is None
    assert assert_same_text(model, texts, expected, rounds.tokens, 1e-4) <= 1
    assert int(rounds.state.paged.pool.free_count) == 4096


def test_want_of_pages_is_told_when_nobody_can_go_on_and_nothing_is_lost(model, expected):
    state = new(model)
    pool = dataclasses.replace(state.paged.pool, free_count=jnp.int32(6))
    rounds = Overlapped(
        model, dataclasses.replace(state, paged=dataclasses.replace(state.paged, pool=pool)), OPTIONS, SPECULATION
    )
    raised = 0
    while True:
        try:
            for _ in rounds:
                pass
            break
        except paging.OutOfPages as error:
            raised += 1
            rounds.cancel(error.requests[-4:])
            assert raised < 8
    assert raised
    finished = [text for text, whole in zip(rounds.tokens, expected) if text == whole]
    assert len(finished) >= REQUESTS - 4 * raised
    assert all(whole[: len(text)] == text for text, whole in zip(rounds.tokens, expected))
    assert int(rounds.held.store.pool.free_count) == rounds.held.store.slots
    assert int(rounds.state.paged.pool.holders.sum()) == 0


def test_rounds_do_not_compile_again(model):
    rounds = Overlapped(model, new(model), OPTIONS, SPECULATION)
    list(rounds)
    before = compilations()
    again = Overlapped(model, new(model, seed=1, limits=list(range(1, REQUESTS + 1))), OPTIONS, SPECULATION)
    list(again)
    assert compilations() == before


def test_sampling_exits_and_what_cannot_be_taken_back_are_refused(model):
    state = new(model)
    for change in ({"sampling": Sampling(temperature=1.0)}, {"exit_threshold": 0.5}, {"exit_step": 2}):
        with pytest.raises(ValueError, match="greedy"):
            Overlapped(model, state, dataclasses.replace(OPTIONS, **change), SPECULATION)
    with pytest.raises(ValueError, match="Tova"):
        Overlapped(model, state, dataclasses.replace(OPTIONS, selector=selectors.get("tova")), SPECULATION)


def test_on_a_gpu_rounds_have_no_loop_of_unknown_length_and_never_ask_the_host(model):
    """All loops are scans, whose turns are constants: the device needs nobody to decide whether to go on."""
    graph, params = nnx.split(model)
    state = new(model)
    held = speculation_overlapped.create_held(model, state, OPTIONS, SPECULATION)

    def chunk(params, state, held):
        _, out = speculate_chunk(graph, params, state, OPTIONS, SPECULATION, 2)
        return out, overlapped_round(
            nnx.merge(graph, params), state, held, jnp.zeros(REQUESTS, bool), OPTIONS, SPECULATION
        )

    text = lower_for_cuda(chunk, params, state, held).as_text()
    conditions = re.findall(r" cond \{(.*?)stablehlo.return", text, re.DOTALL)
    assert len(conditions) == text.count("stablehlo.while(") >= 4
    for condition in conditions:
        assert "stablehlo.constant dense<" in condition
        assert condition.count("stablehlo.") == 2  # the constant and the comparison
    assert "callback" not in text
    assert not {"infeed", "outfeed", "send", "recv"} & set(re.findall(r"stablehlo\.(\w+)", text))
