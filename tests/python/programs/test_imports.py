"""What `import ringcomm` and a group import, and what is imported at its first use."""

from __future__ import annotations

import sys

import pytest
from rank_programs import run_command
from test_public_calls import MODULES

# What takes long to import, and neither the optimizers nor a program over the backend needs.
SLOW = ("triton", "torch._dynamo", "torch.distributed.pipelining", "torch.distributed.checkpoint")
# What neither a program over the backend nor `import ringcomm` needs.
HEAVY = (
    *("ringcomm.ops", "ringcomm.nn", "ringcomm.optim", "ringcomm.parallel", "ringcomm.planner"),
    *("ringcomm.integrations", "ringcomm.measure", "ringcomm.kernels", "transformers", "sympy"),
    *("torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp", *SLOW),
)
GROUP = """
import sys, torch, torch.distributed as dist
dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
name = dist.group.WORLD.group_name
"""
IMPORTS = {
    "import torch, ringcomm\n": HEAVY,
    GROUP: HEAVY,
    "import ringcomm.optim, ringcomm.parallel\n": SLOW,
}
NAMES = f"""
import importlib, sys, torch, ringcomm
assert {{"nn", "ops", "optim", "parallel", "planner", "integrations"}} <= {{*dir(ringcomm)}}
assert "ringcomm.optim" not in sys.modules
assert {{"pipeline", "zero"}} <= {{*dir(ringcomm.parallel)}}
for name in {MODULES!r}:
    found = ringcomm
    for part in name.split(".")[1:]:
        found = getattr(found, part)
    assert found is importlib.import_module(name)
    for public in found.__all__:
        getattr(found, public)
try:
    ringcomm.optimizers
except AttributeError as error:
    print(error)
"""
USES = (
    "got = direct(x)",
    "got = torch.compile(direct, backend='aot_eager', fullgraph=True)(x)",
    """
import ringcomm
def wrapped(x):
    return ringcomm.ops.all_reduce(x) * 2
got = torch.compile(wrapped, backend="aot_eager", fullgraph=True)(x)
""",
)
USE = f"""
operators = torch.ops.ringcomm
{GROUP}
assert "ringcomm.ops" not in sys.modules
def direct(x):
    return operators.all_reduce(x, "sum", name) * 2
x = torch.ones(3, requires_grad=True)
%s
got.sum().backward()
print(got.tolist(), x.grad.tolist())
"""
EXPORT = f"""
{GROUP}
class Doubled(torch.nn.Module):
    def forward(self, x):
        return torch.ops.ringcomm.all_reduce(x, "sum", name) * 2
torch.export.save(torch.export.export(Doubled(), (torch.ones(3),)), sys.argv[1])
"""
LOAD = f"{GROUP}\nprint(torch.export.load(sys.argv[1]).module()(torch.ones(3)).tolist())"
PROGRAMS = {
    "imports": [
        f"before = {{*sys.modules}}\n{start}print(*({{*sys.modules}} - before))"
        for start in IMPORTS
    ],
    "names": [NAMES],
    "uses": [USE % use for use in USES],
    "export": [EXPORT, LOAD],
}
# Programs that each start as if torch had just been imported, and nothing else.
FORKS = """
import os, sys, torch, torch.distributed
for program in sys.argv[2:]:
    if os.fork() == 0:
        exec(program)
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0
    print("ended", flush=True)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The lines that the PROGRAMS print, one each at most; a failure shows its errors."""
    programs = [program for some in PROGRAMS.values() for program in some]
    file = tmp_path_factory.mktemp("exported") / "program.pt2"
    done = run_command(sys.executable, "-c", FORKS, file, *programs, timeout_s=240)
    assert done.returncode == 0, done.stderr
    lines = iter(done.stdout.split("ended\n"))
    return {name: [next(lines).strip() for _ in some] for name, some in PROGRAMS.items()}


def test_heavy_modules_are_not_imported(said: dict[str, list[str]]) -> None:
    """Modules that torch itself imports are not counted: they are what is there before."""
    for line, heavy in zip(said["imports"], IMPORTS.values(), strict=True):
        assert "ringcomm.backend" in line.split()
        assert not [name for name in line.split() if name.startswith(heavy)]


def test_public_names_are_found_without_importing_their_module(said: dict[str, list[str]]) -> None:
    """Also by dir(), which completion in an interpreter uses."""
    assert said["names"] == ["module 'ringcomm' has no attribute 'optimizers'"]


def test_operators_used_directly_have_their_fakes_and_gradients(said: dict[str, list[str]]) -> None:
    """With no import of ringcomm.ops; the namespace may have been looked up before ringcomm."""
    assert said["uses"] == ["[2.0, 2.0, 2.0] [2.0, 2.0, 2.0]"] * len(USES)


def test_a_process_that_has_a_group_loads_an_exported_program(said: dict[str, list[str]]) -> None:
    assert said["export"] == ["", "[2.0, 2.0, 2.0]"]
