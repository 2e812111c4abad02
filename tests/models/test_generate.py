import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import generate as generation
from models.executables import compilations
from models.generate import generate
from models.ouro import Ouro
from models.sampling import Sampling
from sparse_jax import paging, selectors
from tests.models.configs import small_ouro

CONFIG = small_ouro(num_layers=1, loops=3, init=dataclasses.replace(small_ouro().init, gate_std=4.0))
RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(0, 64, length).tolist() for length in (5, 14, 9)]
LIMITS = [20, 7, 13]


@pytest.fixture(autouse=True)
def full_precision():
    with jax.default_matmul_precision("highest"):
        yield


@pytest.fixture(scope="module")
def model() -> Ouro:
    return Ouro(CONFIG, rngs=nnx.Rngs(0))


def run(model, prompts=PROMPTS, **options):
    options = {"max_tokens": LIMITS, "page_size": 4, "chunk": 8} | options
    result = generate(model, prompts, **options)
    for _ in result:
        pass
    return result


def joined(chunks):
    return [[token for chunk in chunks for token in chunk[request]] for request in range(3)]


@functools.cache
def _forward(model):
    return jax.jit(lambda tokens: model.logits(model.forward(tokens).hidden[-1]))


def greedy_by_forward(model, prompt, count):
    sequence = list(prompt)
    for _ in range(count):
        logits = _forward(model)(jnp.asarray(sequence + [0] * (48 - len(sequence)))[None])
        sequence.append(int(jnp.argmax(logits[0, len(sequence) - 1])))
    return sequence[len(prompt) :]


def test_greedy_equals_the_arg_max_of_the_full_forward(model):
    result = run(model)
    for request, (prompt, limit) in enumerate(zip(PROMPTS, LIMITS)):
        assert result.tokens[request] == greedy_by_forward(model, prompt, limit)
    assert result.finished == ["length"] * 3


def test_chunks_hand_out_each_token_once_and_their_size_changes_nothing(model):
    result = generate(model, PROMPTS, max_tokens=LIMITS, page_size=4, chunk=3)
    chunks = [chunk.tokens for chunk in result]
    assert [len(tokens) for tokens in chunks[0]] == [1, 1, 1]  # of the prefill
    assert [len(tokens) for tokens in chunks[1]] == [3, 3, 3]
    assert joined(chunks) == result.tokens == run(model).tokens
    assert list(result) == []  # nothing is left


def test_single_request_equals_its_row_of_a_batch(model):
    assert run(model, PROMPTS[1:2], max_tokens=7).tokens[0] == run(model).tokens[1]


def test_stop_token_ends_a_request_and_is_not_handed_out(model):
    free = run(model).tokens
    stop = free[0][4]
    result = run(model, stop_ids=(63, stop))
    for request in range(3):
        expected = free[request]
        cut = min((expected.index(token) for token in (63, stop) if token in expected), default=len(expected))
        assert result.tokens[request] == expected[:cut]
        assert result.finished[request] == ("stop" if cut < len(expected) else "length")
    assert result.finished[0] == "stop"
    assert result.stats().tokens == sum(map(len, result.tokens)) + result.finished.count("stop")


def test_account_of_dense_decoding_by_hand(model):
    stats = run(model).stats()
    per_token = CONFIG.planes * CONFIG.num_kv_heads
    dense = sum(sum(range(len(p) + 1, len(p) + limit)) for p, limit in zip(PROMPTS, LIMITS)) * per_token
    assert (stats.kv_tokens_read, stats.kv_tokens_dense, stats.kv_fraction) == (dense, dense, 1.0)
    assert (stats.prompt_tokens, stats.tokens, stats.stale) == (28, 40, 0)
    assert stats.exit_loops == (0, 0, 40 - 3)
    assert stats.decode_seconds > 0
    assert stats.prefill_seconds > 0
    assert stats.tokens_per_second == pytest.approx((40 - 3) / stats.decode_seconds)
    assert stats.peak_memory_bytes > 1 << 20
    assert stats.peak_memory_of in ("device", "process")


def test_account_of_a_window_by_hand(model):
    stats = run(model, selector=selectors.get("window", sinks=4, recent=4)).stats()
    read = 0
    for prompt, limit in zip(PROMPTS, LIMITS):
        for length in range(len(prompt) + 1, len(prompt) + limit):
            pages = {0} | set(range((length - 4) // 4, (length + 3) // 4))
            read += sum(min(4, length - 4 * page) for page in pages)
    assert stats.kv_tokens_read == read * CONFIG.planes * CONFIG.num_kv_heads
    assert stats.kv_fraction < 1


def test_account_does_not_overflow(model):
    """Numbers as a long run gives them: the sums are Python's integers."""
    result = generate(model, PROMPTS, max_tokens=LIMITS, page_size=4, chunk=8)
    large = np.full((8, CONFIG.planes, 3), 2**31 - 1, np.int32)
    loops = np.zeros((8, 3), np.int32)
    out = generation.StepOutput(loops, np.full((8, 3), 2**31 - 1, np.int32), large, loops, loops[:, 0])
    result._account(out)
    result._account(out)
    assert result.stats().kv_tokens_read == 2 * large.size * (2**31 - 1)
    assert result.stats().kv_tokens_dense == 2 * 24 * CONFIG.planes * CONFIG.num_kv_heads * (2**31 - 1)


def test_sampled_tokens_do_not_depend_on_the_neighbours(model):
    sampling = Sampling(temperature=1.5, top_k=40, top_p=0.95)
    together = run(model, sampling=sampling, seed=[7, 8, 9])
    others = [PROMPTS[2], PROMPTS[1], PROMPTS[0]]
    moved = run(model, others, sampling=sampling, seed=[3, 8, 4], max_tokens=[13, 7, 20])
    assert together.tokens[1] == moved.tokens[1]
    assert together.tokens == run(model, sampling=sampling, seed=[7, 8, 9]).tokens
    assert together.tokens != run(model, sampling=sampling, seed=[1, 2, 3]).tokens


def with_free_pages(result, count):
    """The same shapes, and so the same compiled code, with fewer free pages."""
    pool = dataclasses.replace(result.state.paged.pool, free_count=jnp.int32(count))
    paged = dataclasses.replace(result.state.paged, pool=pool)
    result.state = dataclasses.replace(result.state, paged=paged)
    return result


def test_out_of_pages_loses_nothing(model):
    """Ten pages of 4 tokens: all prompts fit, but not all that they generate."""
    free = run(model).tokens
    result = with_free_pages(generate(model, PROMPTS, max_tokens=LIMITS, page_size=4, chunk=8), 10)
    chunks = []

    def collect():
        chunks.extend(chunk.tokens for chunk in result)

    with pytest.raises(paging.OutOfPages, match="too few free pages") as error:
        collect()
    assert joined(chunks) == result.tokens
    assert all(result.finished[request] is None for request in error.value.requests)
    with pytest.raises(paging.OutOfPages):  # going on without helping it says so again
        collect()
    while not all(result.finished):
        try:
            collect()
        except paging.OutOfPages as error:
            result.release(error.requests[-1:])
    assert joined(chunks) == result.tokens
    assert set(result.finished) == {"length", "released"}
    for request, reason in enumerate(result.finished):
        tokens = result.tokens[request]
        assert tokens == (free[request] if reason == "length" else free[request][: len(tokens)])


def test_a_prompt_without_pages_waits_while_the_others_finish(model):
    """Six pages of 4: the prompts of 5 and 14 tokens take them all, and have room for 3 and 2 more tokens."""
    free = run(model).tokens
    result = with_free_pages(generate(model, PROMPTS, max_tokens=[4, 3, 13], page_size=4, chunk=8), 6)
    chunks = []

    def collect():
        chunks.extend(chunk.tokens for chunk in result)

    with pytest.raises(paging.OutOfPages) as error:
        collect()
    assert error.value.requests == (2,)
    assert result.finished == ["length", "length", None]
    assert result.tokens == joined(chunks) == [free[0][:4], free[1][:3], []]
    with pytest.raises(paging.OutOfPages) as error:  # going on without helping it says so again
        collect()
    assert error.value.requests == (2,)
    result.release([1])
    with pytest.raises(paging.OutOfPages) as error:
        collect()  # the third prompt fits now, but not all that it wants to say
    assert error.value.requests == (2,)
    assert result.tokens[2] == free[2][:8]  # four pages hold 16 tokens: 9 of the prompt, 7 of the answer
    result.release([0])
    collect()
    assert result.tokens == joined(chunks) == [free[0][:4], free[1][:3], free[2]]
    assert result.finished == ["length"] * 3


def test_out_of_pages_names_all_who_wait_when_nobody_can_go_on(model):
    """As above, but the others want more than their pages hold: they go on until these are full."""
    free = run(model).tokens
    result = with_free_pages(generate(model, PROMPTS, max_tokens=LIMITS, page_size=4, chunk=8), 6)
    with pytest.raises(paging.OutOfPages) as error:
        list(result)
    assert error.value.requests == (0, 1, 2)
    assert result.tokens == [free[0][:4], free[1][:3], []]
    result.release([1])
    with pytest.raises(paging.OutOfPages):
        list(result)
    result.release([0])
    list(result)
    assert result.tokens[2] == free[2]
    assert result.finished == ["released", "released", "length"]


def test_a_prompt_that_never_fits_does_not_stop_the_others(model):
    """Two pages of 16: 10 tokens and what follows fit, 40 do not."""
    prompts = [PROMPTS[1][:10], [7] * 40]
    result = generate(model, prompts, max_tokens=20, page_size=16, pages=2, chunk=8)
    prefills = 0

    def counted(prefill=result._prefill):
        nonlocal prefills
        prefills += 1
        return prefill()

    result._prefill = counted
    with pytest.raises(paging.OutOfPages) as error:
        list(result)
    assert error.value.requests == (1,)
    assert result.tokens == [greedy_by_forward(model, prompts[0], 20), []]
    assert result.finished == ["length", None]
    assert prefills == 2, "the first, and one for the message: in between nothing has changed for the prompt that waits"


def test_pages_released_between_chunks_go_to_the_prompt_that_waits(model):
    free = run(model).tokens
    result = with_free_pages(generate(model, PROMPTS, max_tokens=[4, 3, 8], page_size=4, chunk=8), 6)
    for _ in result:
        result.release([request for request, reason in enumerate(result.finished) if reason])
    assert result.tokens == [free[0][:4], free[1][:3], free[2][:8]]
    assert result.finished == ["length"] * 3


def test_similar_lengths_share_a_compilation(model):
    run(model)
    before = compilations()
    again = run(model, [prompt[:-1] for prompt in PROMPTS], max_tokens=[22, 9, 15], seed=5)
    assert compilations() == before
    assert again.stats().compile_seconds == 0


@pytest.mark.parametrize(
    ("n", "size"), [(1, 16), (16, 16), (17, 32), (64, 64), (65, 80), (129, 160), (2000, 2048), (2049, 2560)]
)
def test_sizes_are_rounded_up(n, size):
    assert generation._rounded_up(n) == size


def test_early_exit_and_bf16_cache(model):
    result = run(model, exit_threshold=0.6, cache_dtype=jnp.bfloat16)
    assert result.state.paged.kv.k.dtype == jnp.bfloat16
    loops = result.stats().exit_loops
    assert sum(loops) == 37
    assert sum(count > 0 for count in loops) > 1


def test_64_bit_mode_changes_nothing(model):
    expected = run(model).tokens
    with jax.enable_x64(True):
        wide = Ouro(CONFIG, rngs=nnx.Rngs(0))
        nnx.update(wide, nnx.state(model))
        assert run(wide).tokens == expected


def test_interpreted_kernels_generate_the_same(model):
    interpreted = run(model, PROMPTS[1:2], max_tokens=7, implementation="interpret")
    assert interpreted.tokens == run(model, PROMPTS[1:2], max_tokens=7).tokens


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "no prompts"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, 64]], {}, r"prompt 0 holds the id 64; the vocabulary is 0 \.\. 63"),
        ([[-1]], {}, "prompt 0 holds the id -1"),
        ([[1] * 100], {"max_tokens": 30}, "passes the 128 positions of the model.*at most 29 tokens"),
        ([[1]], {"max_tokens": 0}, "max_tokens and chunk must be at least 1, got 0"),
        ([[1]], {"chunk": 0}, "max_tokens and chunk must be at least 1"),
        ([[1]], {"max_tokens": [1, 2]}, "one for each of 1 prompts, got 2"),
        ([[1]], {"seed": [1, 2]}, "one for each of 1 requests, got 2"),
        ([[1]], {"page_size": 3}, "page_size must be a power of two, got 3"),
    ],
)
def test_refuses_with_the_values_seen(model, prompts, options, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, **options)


def test_the_last_position_can_be_used(model):
    generate(model, [[1] * 126], max_tokens=3)  # the third new token is sampled, but never written: 126 + 3 - 1 = 128
    with pytest.raises(ValueError, match="at most 3 tokens"):
        generate(model, [[1] * 126], max_tokens=4)


@pytest.mark.parametrize(("name", "dtype"), [("dense", jnp.float32), ("quest", jnp.bfloat16)])
def test_no_call_copies_the_pool(model, name, dtype):
    """What a call needs beside its arguments is far below the pool, and the state is written in place."""
    selector = selectors.get(name, budget=32)
    result = generate(
        model, [[1, 2, 3]] * 2, max_tokens=32, page_size=4, pages=4096, selector=selector, cache_dtype=dtype
    )
    state = result.state
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((state.paged.kv, state.selector)))
    static = {"graph": result._graph, "options": result.options}
    tokens, counts = np.zeros((2, 16), np.int32), np.int32([3, 3])
    prefill = generation._prefill.lower(result._params, tokens, counts, state, **static).compile()
    decode = generation._decode.lower(result._params, state, **static, steps=8, speculation=None).compile()
    for call in (prefill, decode):
        memory = call.memory_analysis()
        assert memory.alias_size_in_bytes >= size
        assert memory.temp_size_in_bytes < size / 20


@pytest.mark.parametrize("name", [name for name in selectors.names() if name != "dsa"])  # which needs an indexer
def test_every_method_gets_pages_of_a_size_that_it_works_with(model, name):
    result = generate(model, [[1, 2, 3]], max_tokens=4, selector=selectors.get(name, budget=32))
    assert result.state.paged.kv.page_size == (1 if "h2o_token" in name else 16)
