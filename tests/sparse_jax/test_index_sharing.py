"""Who leads whom, and one conversion of ids for a group of layers."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from sparse_jax import checked, index_layers, plane_slots, to_slots

N, P = 12, 4
TABLE = np.array([[4, 2, -1], [1, 9, 11]], np.int32)
IDS = np.array([[0, 5, 9, -1, 12], [3, 4, 11, 2**31 - 1, -(2**31)], [-1] * 5], np.int32)
REQUESTS = np.array([0, 1, 1], np.int32)


def kinds(layers):
    return "".join("F" if layer.full else "S" for layer in layers)


@pytest.mark.parametrize(
    ("options", "expected", "leaders"),
    [
        ({}, "FFFFFFFFFF", list(range(10))),
        ({"freq": 4}, "FFSSSFSSSF", [0, 1, 1, 1, 1, 5, 5, 5, 5, 9]),
        ({"freq": 4, "offset": 3}, "FFFSSSFSSS", [0, 1, 2, 2, 2, 2, 6, 6, 6, 6]),
        ({"freq": 2, "offset": 1}, "FSFSFSFSFS", [0, 0, 2, 2, 4, 4, 6, 6, 8, 8]),
        ({"freq": 4, "offset": 0}, "SSSFSSSFSS", [0, 0, 0, 3, 3, 3, 3, 7, 7, 7]),
        ({"freq": 4, "pattern": "FFSSSFSSFF"}, "FFSSSFSSFF", [0, 1, 1, 1, 1, 5, 5, 5, 8, 9]),
        ({"pattern": ["shared", "full"] + ["shared"] * 8}, "SFSSSSSSSS", [0] + [1] * 9),
    ],
)
def test_index_layers(options, expected, leaders):
    layers = index_layers(10, **options)
    assert kinds(layers) == expected
    assert [layer.leader for layer in layers] == leaders


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_layers": 0}, "num_layers must be at least 1, got 0"),
        ({"freq": 0}, "freq must be at least 1, got 0"),
        ({"offset": -1}, "offset must be at least 0, got -1"),
        ({"pattern": "FFS"}, "pattern must have num_layers = 4 entries, got 3"),
        ({"pattern": "FFXS"}, r"pattern must hold F, full, S, shared, got \['X'\] in 'FFXS'"),
        ({"pattern": ["full", "Full", "shared", "shared"]}, r"got \['Full'\]"),
    ],
)
def test_index_layers_errors(options, message):
    with pytest.raises(ValueError, match=message):
        index_layers(**{"num_layers": 4, **options})


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("plane", [0, 1, 4])
def test_a_follower_has_the_slots_of_its_own_conversion(plane, compact):
    """Bit-equal, counts too: page id `plane * N + page` only adds a constant."""
    convert = functools.partial(to_slots, IDS, request_ids=REQUESTS, page_size=P, compact=compact)
    leader, own = convert(TABLE), convert(np.where(TABLE >= 0, TABLE + plane * N, -1))
    if compact:
        (leader, counts), (own, own_counts) = leader, own
        assert counts.tolist() == own_counts.tolist() == [2, 3, 0]
    got = plane_slots(leader, plane, pages=N, page_size=P)
    assert got.dtype == jnp.int32
    assert got.tolist() == own.tolist()


@pytest.mark.parametrize("between", [False, True])
def test_slots_find_the_rows_of_their_plane(between):
    """Planes one after the other, and planes between one page and the next; the plane may be traced."""
    planes, stride = 3, 3 * P if between else P
    pool = np.arange(planes * N * P).reshape((N, planes, P) if between else (planes, N, P))
    slots = to_slots(IDS, TABLE, REQUESTS, page_size=P, page_stride=stride)
    shifted = jax.jit(lambda plane: plane_slots(slots, plane, pages=N, page_size=P, page_stride=stride))
    for plane in range(planes):
        mine = pool[:, plane] if between else pool[plane]
        got = np.asarray(shifted(plane))
        assert (got >= 0).tolist() == (np.asarray(slots) >= 0).tolist()
        for request, row, ids in zip(REQUESTS, got, IDS):
            for slot, token in zip(row, ids):
                assert slot < 0 or pool.ravel()[slot] == mine[TABLE[request, token // P], token % P]
    assert shifted._cache_size() == 1


@pytest.mark.parametrize(("stride", "plane"), [(P, -1), (P, 2**31 // (N * P)), (12, 3), (12, -1), (12, 2**31 - 1)])
def test_a_plane_that_is_not_there_is_absent(stride, plane):
    slots = jnp.arange(4, dtype=jnp.int32)
    assert plane_slots(slots, plane, pages=N, page_size=P, page_stride=stride).tolist() == [-1] * 4


def test_slots_of_other_planes_between_the_pages_are_absent():
    slots = np.array([P - 1, P, 3 * P - 1, 3 * P], np.int32)
    assert plane_slots(slots, 2, pages=N, page_size=P, page_stride=3 * P).tolist() == [3 * P - 1, -1, -1, 5 * P]


def test_slots_beyond_plane_0_do_not_reach_the_next():
    slots = np.array([N * P - 1, N * P, 2**31 - 1, -1, -(2**31)], np.int32)
    assert plane_slots(slots, 1, pages=N, page_size=P).tolist() == [2 * N * P - 1, -1, -1, -1, -1]
    last = (2**31 - 1) // (N * P) - 1
    assert plane_slots(slots, last, pages=N, page_size=P)[0] == (last + 1) * N * P - 1
    with pytest.raises(Exception, match=r"slots: ids must be -1 \(absent\) or lie in \[0, 48\), got 48"):
        checked(functools.partial(plane_slots, pages=N, page_size=P))(slots[:2], 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_stride": 2}, "page_stride must be at least page_size, got 2 and 4"),
        ({"pages": 0}, "pages must be at least 1, got 0"),
        ({"pages": 2**29}, r"pages \* page_stride must fit in 32 bits, got 536870912 \* 4"),
        ({"plane": [0]}, r"plane must have the shape \[\], got \[1\]"),
    ],
)
def test_plane_slots_errors(options, message):
    with pytest.raises(ValueError, match=message):
        plane_slots(**{"slots": jnp.zeros(3, jnp.int32), "plane": 0, "pages": N, "page_size": P, **options})


def test_a_group_in_one_scan():
    """A leader's ids are an argument of its followers: each layer finds the slots of a conversion of its own."""
    layers = index_layers(5, pattern="FFSSF")
    leaders = jnp.array([layer.leader for layer in layers])
    ids = jax.random.randint(jax.random.key(0), (5, 3, 8), -2, 3 * P)  # what an indexer of each layer would choose

    @jax.jit
    def run():
        def step(kept, x):
            layer, leader, chosen = x
            kept = jnp.where(layer == leader, to_slots(chosen, TABLE, REQUESTS, page_size=P), kept)
            return kept, plane_slots(kept, layer, pages=N, page_size=P)

        start = jnp.full((3, 8), -1, jnp.int32)
        return jax.lax.scan(step, start, (jnp.arange(5), leaders, ids))[1]

    for layer, got in enumerate(run()):
        table = np.where(TABLE >= 0, TABLE + layer * N, -1)
        own = to_slots(ids[layers[layer].leader], table, REQUESTS, page_size=P)
        assert got.tolist() == own.tolist()


def test_the_code_in_the_documents_runs():
    """The section of docs/operations.md."""
    text = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")
    section = text[text.index("## Sparse MLA: ids") :]
    names: dict = {}
    exec(compile(section.split("```python")[1].split("```")[0], "operations.md", "exec"), names)
    assert list(names["reads"]) == [1, 2, 3, 4]
    assert names["counts"].tolist() == [2, 3]
    assert names["slots"].tolist() == [[256, 164, -1], [255, 69, 6]]
    assert names["reads"][2].tolist() == [[896, 804, -1], [895, 709, 646]]
