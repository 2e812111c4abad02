"""The shape of the repository: who may import whom, who may name Triton, and how long things may grow."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("pallas_kernels", "sparse_jax", "models")  # each may import those before it
LONGEST_FUNCTION = 60  # lines, without the docstring
LONGEST_FILE = 400


def python_files(folder: str) -> list[Path]:
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


ALL_FILES = [path for folder in (*PACKAGES, "tests") for path in python_files(folder)]


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported_modules(path: Path) -> set[str]:
    """Full dotted names of everything that a file imports, at its top or inside a function."""
    package = list(path.relative_to(ROOT).with_suffix("").parts[:-1])
    names = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join(base + ([node.module] if node.module else []))
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


def top_level(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imported_modules(path)}


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_go_one_way(package):
    later = {*PACKAGES[PACKAGES.index(package) + 1 :], "tests", "notebooks"}
    wrong = {
        relative(path): sorted(top_level(path) & later) for path in python_files(package) if top_level(path) & later
    }
    assert not wrong, f"{package} may import only {PACKAGES[: PACKAGES.index(package)]} of this repository"


@pytest.mark.parametrize("package", ["pallas_kernels", "sparse_jax"])
def test_library_knows_no_model_code(package):
    outside = {"flax", "optax", "safetensors", "tokenizers", "huggingface_hub", "orbax"}
    wrong = {
        relative(path): sorted(top_level(path) & outside) for path in python_files(package) if top_level(path) & outside
    }
    assert not wrong


def test_kernels_need_nothing_but_jax():
    allowed = {"jax", "numpy", "pallas_kernels", "__future__"}
    standard = {
        "collections",
        "contextlib",
        "dataclasses",
        "enum",
        "functools",
        "itertools",
        "math",
        "typing",
        "warnings",
    }
    wrong = {
        relative(path): sorted(top_level(path) - allowed - standard)
        for path in python_files("pallas_kernels")
        if top_level(path) - allowed - standard
    }
    assert not wrong


def test_models_do_without_their_training():
    """Only the training itself and the command line know how a model was trained."""
    allowed = {"models/train.py", "models/cli.py"}
    wrong = {
        relative(path): found
        for path in python_files("models")
        if relative(path) not in allowed and not relative(path).startswith("models/training/")
        if (found := sorted(name for name in imported_modules(path) if name.startswith("models.training")))
    }
    assert not wrong


def names_triton(path: Path) -> list[str]:
    """Imports and names by which a file would bind itself to one lowering."""
    found = [
        name for name in imported_modules(path) if re.search(r"pallas\.(triton|mosaic_gpu)|jax_triton|^triton", name)
    ]
    for node in ast.walk(parse(path)):
        name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if name in {"plgpu", "CompilerParams", "TritonCompilerParams"}:
            found.append(f"line {node.lineno}: {name}")
    return found


def test_only_lowering_names_triton():
    library = [path for package in PACKAGES for path in python_files(package)]
    wrong = {relative(path): names_triton(path) for path in library if names_triton(path)}
    wrong.pop("pallas_kernels/lowering.py", None)
    assert not wrong, "kernels call pallas_kernels/lowering.py instead"


def body_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring."""
    assert function.end_lineno is not None
    lines = function.end_lineno - function.lineno + 1
    first = function.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        assert first.end_lineno is not None
        lines -= first.end_lineno - first.lineno + 1
    return lines


def test_functions_and_files_stay_short():
    """Past these lengths a name is missing. Whoever needs more says so in LONGER, with the reason."""
    longer = dict(LONGER)
    offenders = []
    for path in ALL_FILES:
        length = len(path.read_text(encoding="utf-8").splitlines())
        if length > longer.pop(relative(path), LONGEST_FILE):
            offenders.append(f"{relative(path)}: {length} lines")
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                place = f"{relative(path)}::{node.name}"
                if body_lines(node) > longer.pop(place, LONGEST_FUNCTION):
                    offenders.append(f"{place}: {body_lines(node)} lines")
    assert not offenders, f"longer than {LONGEST_FUNCTION} (function) or {LONGEST_FILE} (file) lines"
    assert not longer, "LONGER names something that is gone"


# "file" or "file::function": the most lines it may have, with the reason beside it.
LONGER: dict[str, int] = {}


def test_readme_map_is_true():
    """Every path in the README's tables and trees exists, so that its map leads somewhere."""
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("no README.md yet")
    text = readme.read_text(encoding="utf-8")
    quoted = re.findall(r"`([\w./-]+/[\w./-]*|[\w-]+\.(?:py|md|toml|ipynb))`", text)
    linked = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]
    inside = ("pallas_kernels/", "sparse_jax/", "models/", "tests/", "notebooks/", "docs/", ".ci/")
    paths = {path for path in quoted if path.startswith(inside) or "/" not in path} | {path for path in linked if path}
    missing = sorted(path for path in paths if not (ROOT / path).exists())
    assert not missing


def test_every_package_is_in_the_wheel():
    import tomllib

    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert sorted(settings["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == sorted(PACKAGES)
