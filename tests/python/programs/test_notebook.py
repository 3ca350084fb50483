"""docs/tutorial/tutorial.ipynb: it runs from top to bottom, and has the outputs of a run.

RINGCOMM_WRITE_NOTEBOOK=1 pytest tests/python/programs/test_notebook.py  # writes the outputs
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).resolve().parents[3] / "docs" / "tutorial" / "tutorial.ipynb"
LIMIT_S = 240


def test_its_cells_compile() -> None:
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 5
    assert set(notebook["metadata"]) == {"kernelspec", "language_info"}
    for cell in cells:
        lines = [line for line in cell["source"] if not line.startswith("%%writefile ")]
        compile("".join(lines), cell["id"], "exec")


def shown(notebook: Any) -> list[list[str]]:
    """What each cell prints or returns; stderr and process ids differ between runs."""
    outputs = [
        [out for out in cell.get("outputs", []) if out.get("name") != "stderr"]
        for cell in notebook.cells
    ]
    texts = [[out.get("text") or out["data"]["text/plain"] for out in outs] for outs in outputs]
    return [[re.sub(r"pid \d+ on [^)]*", "pid", text) for text in cell] for cell in texts]


@pytest.mark.slow
def test_its_outputs_are_those_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A code host shows the stored outputs."""
    client = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name))
    notebook: Any = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    stored = shown(notebook)
    (tmp_path / "beside").mkdir()
    where = {"metadata": {"path": str(tmp_path / "beside")}}
    runner = client.NotebookClient(notebook, timeout=LIMIT_S, resources=where, record_timing=False)
    metadata = json.loads(json.dumps(notebook.metadata))  # a run adds the version of Python
    runner.execute()
    notebook.metadata = nbformat.from_dict(metadata)
    if os.environ.get("RINGCOMM_WRITE_NOTEBOOK"):
        for cell in notebook.cells:
            if cell.cell_type == "code":
                cell.outputs = [out for out in cell.outputs if out.get("name") != "stderr"]
        nbformat.write(notebook, NOTEBOOK)
        stored = shown(notebook)
    assert shown(notebook) == stored
    said = json.dumps(stored)
    assert said.count("tensor([3., 3., 3., 3.])") == 2
    assert "'lomo': [0.04, 0.04]" in said
