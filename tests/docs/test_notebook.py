"""docs/notebook.md as a notebook: executed by a kernel, cell after cell, and each thing shows itself."""

import runpy
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def test_the_notebook_is_that_of_the_page():
    assert (DOCS / "notebook.ipynb").read_text() == runpy.run_path(str(DOCS / "make_notebook.py"))["notebook"]()


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    nbformat = pytest.importorskip("nbformat")
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(DOCS.parent))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(DOCS / "notebook.ipynb", as_version=4)
    client.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            shown[cell.source.splitlines()[-1].strip()] = cell.outputs
    for last in ("flow", "study", "run", "odd", "batch"):
        assert "<table" in kinds(shown[last])["text/html"], last
    for last in ("flow.graph()", "plan"):
        assert "<svg" in kinds(shown[last])["image/svg+xml"], last
    [mistake] = [out.text for out in shown["print(finding)"] if out.output_type == "stream"]
    assert "reads 'advantages'" in mistake and "Cell In[" in mistake and "ipykernel" not in mistake
    assert "Cell In[" in kinds(shown["flow"])["text/html"], "a program is told with its cell"
    assert "data:image/png" in kinds(shown["odd"])["text/html"], "the curve of its reward"


def kinds(outputs):
    """What was shown, by its kind."""
    return {kind: text for out in outputs for kind, text in out.get("data", {}).items()}
