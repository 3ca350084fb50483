"""Private names of torch that the package uses are there in the running torch.

Lint keeps them in ringcomm/torch_names.py (SLF001, TID251); torch_stage.py overrides some.
"""

from __future__ import annotations

import importlib
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ringcomm import _extension, torch_names

SOURCE = Path(torch_names.__file__).read_text(encoding="utf-8")


def test_the_running_torch_has_every_name() -> None:
    """Those that are spelled from torch or dist on; the others are of objects, as below."""
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


@in_ranks(2)
def test_objects_have_the_names(rank: int) -> None:
    group = dist.group.WORLD
    assert group is not None
    gone = []
    if not hasattr(torch_names.backend_of(group, torch.device("cpu")).options, "_timeout"):
        gone.append("Backend.Options._timeout")
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    torch_names.ignore_in_ddp(model, ["1.weight", "1.bias"])
    if torch_names.ignored_in_ddp(model) != ["1.weight", "1.bias"]:
        gone.append("_ddp_params_and_buffers_to_ignore")
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda *_: seen.append(torch_names.active_ddp()))
    ddp = DistributedDataParallel(model)
    ddp(torch.ones(1, 2))
    if seen != [ddp]:
        gone.append("DistributedDataParallel._get_active_ddp_module")
    params = {id(param) for param in torch_names.params_of_ddp(ddp)}
    if params != {id(param) for param in model[0].parameters()}:
        gone.append("DistributedDataParallel._module_parameters")
    if not torch_names.is_ignored_in_ddp(model.get_parameter("1.weight")):
        gone.append("Parameter._ddp_ignored")
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("a", "b"))
    assert torch_names.flat_mesh(mesh).size() == dist.get_world_size()
    assert torch_names.root_mesh(mesh["b"]) == mesh
    unit: Any = fully_shard(nn.Linear(4, 4), mesh=mesh["b"])
    gone += [
        "FSDPParamGroup._record_post_forward"
        for group in torch_names.fsdp_groups(unit)
        if not hasattr(type(group), "_record_post_forward")
    ]
    unit(torch.ones(1, 4)).sum().backward()
    for param in (param for params in torch_names.fsdp_params(unit) for param in params):
        names = ("_unsharded_param", "unsharded_accumulated_grad", "sharded_param", "reduce_dtype")
        gone += [f"FSDPParam.{name}" for name in names if not hasattr(param, name)]
    assert len(torch_names.fsdp_params(unit)[0]) == 2
    alike = torch_names.like_dtensor(unit.weight, torch.ones(2, 4))
    assert (alike.shape, alike.placements) == (unit.weight.shape, unit.weight.placements)
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
