"""Notebooks are short, clean and run from top to bottom."""

import ast
import json
import os
import re
import tomllib
from pathlib import Path

import pytest

from transformer import figures

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(ROOT.glob("notebooks/*.ipynb"))
MOST_CELLS, LONGEST = 15, 12  # lines of a cell
each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


def python(cell: str) -> ast.Module:
    return ast.parse(re.sub(r"^(\s*)%pip .*$", r"\1pass", cell, flags=re.MULTILINE))


@each
def test_notebooks_are_short_and_clean(path):
    book = json.loads(path.read_text())
    assert len(book["cells"]) <= MOST_CELLS
    code = [cell for cell in book["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code), "strip the outputs"
    assert "%pip install" in "".join(code[0]["source"])
    for cell in cells(path, "code"):
        assert len(cell.splitlines()) <= LONGEST
        kinds = (ast.FunctionDef, ast.ClassDef)
        assert not any(isinstance(node, kinds) for node in ast.walk(python(cell))), "definitions belong in the package"


@each
def test_notebooks_show_figures_and_assert_numbers(path):
    nodes = [node for cell in cells(path, "code") for node in ast.walk(python(cell))]
    assert any(isinstance(node, ast.Assert) for node in nodes)
    called = [node.func for node in nodes if isinstance(node, ast.Call)]
    drawn = {f.attr for f in called if isinstance(f, ast.Attribute) and getattr(f.value, "id", "") == "figures"}
    assert drawn and drawn <= set(figures.__all__)
    text = "".join(cells(path, "markdown"))
    assert re.search(r"[\u4e00-\u9fff]", text) and re.search(r"[a-z]{3}", text), "in both languages"


def test_every_figure_is_in_a_notebook():
    shown = "".join("".join(cells(path, "code")) for path in NOTEBOOKS)
    missing = [name for name in figures.__all__ if f"figures.{name}(" not in shown]
    assert not missing


def test_the_repository_is_named_once_and_installed_in_colab_alone():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (install,) = {cells(path, "code")[0] for path in NOTEBOOKS}
    assert f'"{project["urls"]["Repository"]}"' in install and "TRANSFORMER_REPOSITORY" in install
    assert re.search(r'find_spec\("google.colab"\):\n(?: .*\n)*    %pip install', install)
    assert {"figures", "tpu", "cuda"} <= set(project["optional-dependencies"])


@each
def test_notebooks_run(path, monkeypatch):
    for name in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(name)
    import nbclient
    import nbformat

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("TRANSFORMER_SMALL", "1")
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # as a user's kernel: one device, unless a notebook asks for more
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    nbclient.NotebookClient(book, timeout=600, kernel_name="python3").execute()
    outputs = [out for cell in book.cells if cell.cell_type == "code" for out in cell.outputs]
    kinds = {kind for out in outputs for kind in out.get("data", {})}
    assert "application/vnd.plotly.v1+json" in kinds
