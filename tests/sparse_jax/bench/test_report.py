"""What a person and a program read: tables, JSON, documents, plots, and the command."""

import dataclasses
import io
import json
import re
import sys

import jax
import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from sparse_jax.bench import attention, cases, mla, peers, readme, report
from sparse_jax.bench.command import bench, file_name, parse_config
from tests.sparse_jax.bench.shapes import TINY, TINY_STEP, example, result, row


def printed(what):
    console = Console(width=120, file=io.StringIO())
    console.print(what.table())
    return console.file.getvalue()


def test_json_holds_shapes_versions_and_numbers(tmp_path):
    example().save(tmp_path / "new" / "result.json")
    read = json.loads((tmp_path / "new" / "result.json").read_text())
    assert read["environment"]["jax"] == "0.11.2"
    assert read["cases"][0]["context"] == 64
    assert read["rows"][0]["terabytes_per_second"] == 0.5
    assert read["rows"][0]["of_copy"] == 0.5
    assert read["rows"][0]["kernels"] == {"fused": [1.5, 2.0]}
    assert read["rows"][1]["note"] == "skipped: no room"
    assert report.environment()["jax"] == jax.__version__


def test_table_leaves_out_empty_columns_and_says_why_a_number_is_missing():
    text = printed(example())
    assert "kernel us" not in text
    assert "0.50" in text
    assert "tiny dense triton: skipped: no room" in text
    assert "splits=4" in text


def test_table_without_rows_tells_why():
    empty = result("attention", [TINY], [])
    empty.notes.append("tiny was not begun")
    assert "tiny was not begun" in printed(empty)


def test_details_of_a_suite_are_columns():
    rows = [row("dense", "triton", 9.0, details={"layers": 1}), row("dense", "triton", 20.0, details={"waits": 2.5})]
    text = printed(result("step", [TINY_STEP], rows))
    assert "layers" in text
    assert "2.5" in text
    assert "layers 1" in report.line(rows[0])


def test_kernels_are_listed():
    (line,) = report.kernel_lines(example().rows[0])
    assert re.search(r"1\.50 us in +2\.00 launches of fused", line)


def test_config_is_read_from_text():
    assert parse_config(" ") is None
    config = parse_config("splits=4, num_warps=8,exact=true")
    assert (config.splits, config.num_warps, config.exact) == (4, 8, True)
    for wrong in ("splits", "splits=many", "stripes=3"):
        with pytest.raises(ValueError, match=r"setting|config"):
            parse_config(wrong)


@pytest.fixture
def command(tiny_suites, monkeypatch):
    monkeypatch.setattr(attention, "rows", lambda case, plan: iter(example().rows))
    app = typer.Typer()
    app.command()(bench)
    return lambda *arguments: CliRunner().invoke(app, arguments)


def test_command_prints_a_table_and_writes_json(command, tmp_path):
    path = tmp_path / "result.json"
    done = command("--quick", "--kernels", "--json", str(path))
    assert done.exit_code == 0, done.output
    assert "skipped: no room" in done.output
    assert "launches of fused" in done.output
    assert len(json.loads(path.read_text())["rows"]) == 2


def test_command_runs_several_suites(command, tmp_path):
    done = command("attention", "topk", "--quick", "--only", "by id", "--json-dir", str(tmp_path))
    assert done.exit_code == 0, done.output
    runs = {path.name: json.loads(path.read_text()) for path in tmp_path.iterdir()}
    assert {run["suite"] for run in runs.values()} == {"attention", "topk"}
    names = sorted(file_name(suite, report.environment()["device"]) for suite in ("attention", "topk"))
    assert sorted(runs) == names
    assert file_name("topk", "NVIDIA H200") == "topk-h200.json"


@pytest.mark.parametrize(
    "wrong",
    [
        ("nonsense",),
        ("attention", "nonsense"),
        ("--cases", "b9000"),
        ("--config", "splits=x"),
        ("attention", "topk", "--json", "x"),
    ],
)
def test_command_explains_what_is_wrong(command, wrong):
    done = command(*wrong)
    assert done.exit_code == 2
    assert "Traceback" not in done.output


def h200_runs():
    """Runs of the suites as the GPU gives them, with made-up numbers."""
    rows = []
    for case in cases.ATTENTION:
        for op in attention.OPS:
            if not case.ops or op.name in case.ops:
                microseconds = op.bytes(case) / 4e6
                rows.append(row(op.name, "triton", microseconds, case.name))
                rows.append(row(op.name, "xla", 4 * microseconds, case.name))
    rows.append(row("dense", "torch SDPA, contiguous", 1851.0, "b64-32k"))
    rows.append(row("dense", "jax cudnn, contiguous", None, "b64-32k", note="RuntimeError: refused"))
    ids = [row("top-k by id", "triton", 19.5, "64x32k"), row("top-k by score", "triton", 33.0, "64x32k")]
    ids.append(row("top-k by score", "lax.top_k", 280.0, "64x32k"))
    layers = [row("dense", "triton", 99.0, "b1-32k", details={"layers": 24, "us a layer": 4.25})]
    runs = [
        result("attention", cases.ATTENTION, rows),
        result("topk", cases.TOP_K, ids),
        result("step", cases.STEP, layers),
    ]
    return {run.suite: json.loads(run.to_json()) for run in runs}


def later_runs():
    """Runs of the suites that came later, the same way."""
    latent = []
    for case in cases.MLA:
        for op in mla.OPS:
            if op.name in case.ops:
                microseconds = max(op.bytes(case) / 4e6, op.flop(case) / 500e6)
                details = {"TFLOP/s": op.flop(case) / microseconds / 1e6, "times dense": 16.2}
                measured = row(op.name, "triton", microseconds, case.name, details=details)
                latent.append(dataclasses.replace(measured, bytes=op.bytes(case)))
    corrected = [
        row(op, "triton", microseconds, case.name, details={"of dense": microseconds / 72})
        for case in cases.REFERENCE
        for op, microseconds in (("dense", 72.0), ("capture", 108.0), ("consume", 18.0))
    ]
    runs = [result("mla", cases.MLA, latent), result("reference", cases.REFERENCE, corrected)]
    found = {run.suite: json.loads(run.to_json()) for run in runs}
    rounds = dataclasses.replace(row("rounds", "triton", 84.9, "b8", details={"acceptance": 0.937}), bytes=0)
    texts = {"name": "b8", "batch": 8, "prompt": 512, "tokens": 512}
    steps = {"name": "b8-8k", "batch": 8, "context": 8192, "retention": 0.1}
    step = row("step: reference 0.1", "triton", 9000.0, "b8-8k", details={"times dense": 1.4, "ideal": 1.6})
    for suite, case, one in (("speculation", texts, rounds), ("ouro", steps, step)):
        run = json.loads(dataclasses.replace(result(suite, [], [one]), cases=[case]).to_json())
        run["rows"][0]["terabytes_per_second"] = 0.0 if suite == "speculation" else 1.5
        found[suite] = run
    return found


def documented_in(root, runs):
    """A repository with runs and two documents."""
    folder = root / readme.FOLDER
    folder.mkdir(parents=True)
    for suite, run in runs.items():
        (folder / f"{suite}-h200.json").write_text(json.dumps(run))
    block = "<!-- benchmark {0}: how -->\nold\n<!-- end of benchmark {0} -->\n"
    (root / "README.md").write_text("# Title\n" + block.format("headline") + "end\n")
    (folder / "README.md").write_text("".join(map(block.format, runs)))
    return root


@pytest.fixture
def documented(tmp_path):
    return documented_in(tmp_path, h200_runs())


def test_documents_and_plots_are_made_from_the_runs(documented, capsys):
    readme.main(documented)
    text = (documented / "README.md").read_text()
    assert "old" not in text
    assert text.startswith("# Title\n<!-- benchmark headline: how -->\n| case |")
    assert text.endswith("<!-- end of benchmark headline -->\nend\n")
    assert len([line for line in text.splitlines() if line.startswith("| ")]) <= 2 + 15
    assert re.search(r"\| B 64 x 32,768 \| dense \| \*\*2,148\*\* .*8,591 \| torch SDPA 1,851 \|", text)
    assert re.search(r"\| 64 x 32,768, k 2,048 \| top-k by id \| \*\*19.5\*\* .* lax.top_k 280 \|", text)
    full = (documented / readme.FOLDER / "README.md").read_text()
    assert "jax cudnn, contiguous: RuntimeError: refused" in full
    assert "| us a layer |" in full
    assert "4.2" in full
    for name in ("time", "speedup", "roofline"):
        svg = (documented / readme.FOLDER / f"{name}.svg").read_text()
        assert "2026-11-29T19:48:56" in svg
        assert len(svg) < 200_000
    assert "token-sparse, B 64" in (documented / readme.FOLDER / "speedup.svg").read_text()
    assert capsys.readouterr().out.count("written:") == 5


def test_later_suites_have_tables_and_plots_of_their_own(tmp_path, capsys):
    root = documented_in(tmp_path, later_runs())
    readme.main(root)
    short = (root / "README.md").read_text()
    assert "TFLOP/s | times dense |" in short.splitlines()[2]
    assert re.search(r"\| B 128 x 32,768, Hq 128 \| sparse MLA, 2,048 kept \| .* \| 500 \| 16.2 \|", short)
    consumed = next(line for line in short.splitlines() if "reference correction: consume" in line)
    assert consumed.startswith("| B 1 x 32,768 |")
    assert consumed.endswith("| 4 |")  # 18 of 72 us
    assert "| B 8 x 8,192 | Ouro-1.4B, step: reference 0.1 | **9,000** |" in short
    assert "latents of 512 + 64" in short
    assert "speculation:" not in short  # has no row there
    full = (root / readme.FOLDER / "README.md").read_text()
    assert "| B 128 x 32,768, Hq 16, T 2 | sparse MLA" in full
    assert re.search(r"\| consume .*\| 0\.25 \|", full)
    assert re.search(r"\| B 8, 512 \+ 512 tokens \| rounds \| .* \| 0\.94 \|", full)
    assert "0.00" not in full[full.index("benchmark speculation") :].split("end of benchmark")[0]
    for name in ("mla", "reference"):
        assert f"]({name}.svg)" in full
        assert "2026-11-29" in (root / readme.FOLDER / f"{name}.svg").read_text()
    assert capsys.readouterr().out.count("written:") == 4


def test_plots_of_latents_and_corrections_show_each_operation():
    plots = pytest.importorskip("sparse_jax.bench.plots")
    runs = later_runs()
    axes = plots.latent_roofline(runs["mla"]).axes[0]
    found = {points.get_label(): points.get_offsets() for points in axes.collections}
    assert set(plots.LATENT) == set(found) == {op.name for op in mla.OPS} - {"sparse MLA, sorted ids"}
    # 16, 64 and 128 heads of fp8 rows: 53, 212 and 425 FLOP a byte but for queries and outputs.
    assert found["sparse MLA, fp8_ds_mla"][0][0] == pytest.approx(
        425 * 2048 * 656 / (2048 * 656 + 128 * 2176), rel=0.01
    )
    bars = plots.correction_times(runs["reference"]).axes[0].patches
    assert len(bars) == 3 * len(cases.REFERENCE)


def test_plots_are_the_same_each_time(documented):
    path = documented / readme.FOLDER / "roofline.svg"
    readme.main(documented)
    first = path.read_bytes()
    readme.main(documented)
    assert path.read_bytes() == first


def test_speedup_of_a_run_with_dense_rows_alone():
    plots = pytest.importorskip("sparse_jax.bench.plots")
    run = h200_runs()["attention"]
    dense = run | {"rows": [row for row in run["rows"] if row["op"] == "dense"]}
    labels = [line.get_label() for line in plots.speedup_by_kept(dense).axes[0].get_lines()]
    assert labels == ["1 / fraction"]


def test_every_dense_peer_has_a_marker():
    plots = pytest.importorskip("sparse_jax.bench.plots")
    assert set(peers.DENSE) <= set(plots.PEERS)


def test_speedup_is_dense_over_sparse():
    plots = pytest.importorskip("sparse_jax.bench.plots")
    lines = plots.speedup_by_kept(h200_runs()["attention"]).axes[0].get_lines()
    found = {line.get_label(): dict(zip(*line.get_data())) for line in lines}
    assert list(found) == [f"{op}, B {batch}" for batch in (64, 8) for op in ("page-sparse", "token-sparse")] + [
        "1 / fraction"
    ]
    assert sorted(found["page-sparse, B 8"]) == [kept / 32_768 for kept in (512, 1024, 2048, 4096, 16_384)]
    assert found["page-sparse, B 64"][0.0625] == pytest.approx(16, rel=0.02)


def test_without_runs_the_documents_say_so(documented):
    for path in (documented / readme.FOLDER).glob("*.json"):
        path.unlink()
    texts = readme.documents(documented)
    assert all(readme.NO_RUN in text for text in texts.values())


def test_without_matplotlib_the_tables_are_written(documented, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "sparse_jax.bench.plots", raising=False)
    monkeypatch.delattr("sparse_jax.bench.plots", raising=False)
    readme.main(documented)
    assert "no plots: matplotlib" in capsys.readouterr().out
