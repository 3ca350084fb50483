"""docs/tutorial/tutorial.ipynb: it runs from top to bottom, and is kept without outputs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[3] / "docs" / "tutorial" / "tutorial.ipynb"
LIMIT_S = 240


def test_its_cells_compile_and_have_no_outputs() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    for cell in cells:
        assert (cell["outputs"], cell["execution_count"]) == ([], None)
        lines = [line for line in cell["source"] if not line.startswith("%%writefile ")]
        compile("".join(lines), cell["id"], "exec")


@pytest.mark.slow
def test_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    client = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    (tmp_path / "beside").mkdir()
    where = {"metadata": {"path": str(tmp_path / "beside")}}
    client.NotebookClient(notebook, timeout=LIMIT_S, resources=where).execute()
    said = json.dumps([cell.get("outputs") for cell in notebook.cells])
    assert said.count("tensor([3., 3., 3., 3.])") == 2
    assert "'lomo': [0.04, 0.04]" in said
