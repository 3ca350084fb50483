"""Private names of torch that the package uses are there in the running torch.

Lint keeps them in ringcomm/torch_names.py (SLF001, TID251); torch_stage.py overrides some.
"""

from __future__ import annotations

import importlib
import re
from operator import attrgetter
from pathlib import Path

import pytest
import torch.distributed as dist

from ringcomm import _extension, torch_names

SOURCE = Path(torch_names.__file__).read_text(encoding="utf-8")


def test_the_running_torch_has_every_name() -> None:
    """Those that are spelled from torch or dist on; those of objects: training's tests."""
    import torch.distributed.tensor._utils

    names = sorted(set(re.findall(r"\b((?:torch|dist)(?:\.\w+)*\._\w+(?:\.\w+)*)", SOURCE)))
    names += [f"dist.ProcessGroupGloo.{name}" for name in torch_names.GLOO_STATICS]
    names += [f"dist.ProcessGroupGloo._Options.{name}" for name in torch_names.GLOO_OPTIONS]
    assert len(names) > 30
    gone = []
    for name in names:
        head, _, rest = name.partition(".")
        try:
            attrgetter(rest)({"torch": torch, "dist": dist}[head])
        except AttributeError:
            gone.append(name)
    assert not gone, f"torch {torch.__version__} has no {', '.join(gone)}: see torch_names.py"


def test_an_untried_torch_is_warned_about_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By rank 0 of a job, and by a program without ranks."""
    monkeypatch.delenv("RANK", raising=False)
    importlib.reload(_extension)
    monkeypatch.setattr(torch_names, "NEWEST_TRIED", (2, 10))
    with pytest.warns(UserWarning, match=r"tried with torch up to 2\.10, .* install torch 2\.10"):
        importlib.reload(_extension)
    monkeypatch.setenv("RANK", "1")
    importlib.reload(_extension)
