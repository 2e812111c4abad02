"""docs/selectors.md is true: its names are those that exist, and its selector works."""

import re
from pathlib import Path

import numpy as np

from sparse_jax import selectors
from sparse_jax.selectors import base

TEXT = (Path(__file__).parents[3] / "docs" / "selectors.md").read_text(encoding="utf-8")


def section(title):
    return TEXT[TEXT.index(f"## {title}") :].split("\n## ")[0]


def first_cells(text):
    return [name for row in re.findall(r"^\| (`[^|]*)\|", text, re.MULTILINE) for name in re.findall(r"`(\w+)", row)]


def test_the_table_names_every_method():
    assert sorted(first_cells(section("The methods"))) == list(selectors.names())


def test_options_and_methods_exist():
    parts = [selectors.Selector, selectors.PageSelector, selectors.TokenSelector, type(selectors.get("quest"))]
    for name in first_cells(section("The protocol")):
        assert any(hasattr(part, name) for part in parts), name
    known = {name for method in selectors.names() for name in dir(selectors.get(method))}
    assert set(first_cells(section("Options").split("A budget is one")[0])) <= known
    for name in ("h2o", "tova", "snapkv", "rocketkv"):
        assert not selectors.get(name).shareable


def test_the_example_works(capsys):
    (block,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    found: dict = {}
    try:
        exec(compile(block, "docs/selectors.md", "exec"), found)
    finally:
        base._registry.pop("low_norm", None)  # other tests go over all names
    assert capsys.readouterr().out == "[[64 64]]\n"
    norms = np.linalg.norm(np.asarray(found["k"])[0], axis=-1).reshape(25, 8, 2).min(axis=1)
    for head, row in enumerate(np.asarray(found["attended"].positions[0])):
        pages = set((row[row >= 0] // 8).tolist())
        best = [page for page in np.argsort(norms[:, head]).tolist() if page not in {0, 23, 24}]
        assert pages == {0, 23, 24, *best[:5]}
    # A page that changes hands keeps nothing of its first owner.
    selector, state, loud = found["selector"], found["attended"].state, np.full((8, 2, 16), 100.0, np.float32)
    state = selector.write(state, loud, np.arange(40, 48, dtype=np.int32))
    np.testing.assert_allclose(state.least[5], 400.0)
    state = selector.copy(state, np.array([5, -1], np.int32), np.array([7, 3], np.int32))
    np.testing.assert_allclose(state.least[7], 400.0)
    assert (state.least[3] < 100).all()
