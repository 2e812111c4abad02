"""Every notebook runs from top to bottom without an error, from a checkout that is not installed, too."""

import os
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
OPTIMISED = ("03_reference_correction",)  # computes for longer than it compiles; the others take the quick compilation


def read(path: Path):
    nbformat = pytest.importorskip("nbformat")
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_committed_without_outputs(path):
    cells = [cell for cell in read(path).cells if cell.cell_type == "code"]
    assert cells
    assert not any(cell.outputs or cell.execution_count for cell in cells), "clear all outputs before the commit"


@pytest.mark.notebook
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("default")  # those of Jupyter's own machinery are not ours to mend
def test_notebook_runs(path, tmp_path, monkeypatch):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", str(int(path.stem not in OPTIMISED)))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))  # no start-up files of the user
    notebook = read(path)
    start = time.monotonic()
    # A cell that raises makes execute() raise CellExecutionError, which shows the cell and its traceback.
    client = nbclient.NotebookClient(notebook, timeout=400, resources={"metadata": {"path": str(path.parent)}})
    client.execute()
    print(f"{path.name}: {time.monotonic() - start:.0f} s")
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not any(output.output_type == "error" for output in outputs)
    assert any("image/png" in output.get("data", {}) for output in outputs), "the plot is missing"
