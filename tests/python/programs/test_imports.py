"""What `import ringcomm` and a group import, and what is imported at its first use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from test_public_calls import MODULES

TIMEOUT_S = 120
# What takes long to import, and neither a program over the backend nor `import ringcomm` needs.
HEAVY = (
    *("ringcomm.ops", "ringcomm.nn", "ringcomm.optim", "ringcomm.parallel", "ringcomm.planner"),
    *("ringcomm.integrations", "ringcomm.measure", "ringcomm.kernels", "triton", "transformers"),
    *("sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor"),
    *("torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.checkpoint"),
)
GROUP = """
import sys, torch, torch.distributed as dist
dist.init_process_group("ringcomm", store=dist.HashStore(), rank=0, world_size=1)
name = dist.group.WORLD.group_name
"""


# Programs that each start as if torch had just been imported, and nothing else.
FORKS = """
import os, sys, torch, torch.distributed
for program in sys.argv[1:]:
    pid = os.fork()
    if pid == 0:
        exec(program)
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""


def outputs_of(*programs: str) -> list[str]:
    """The lines that programs print, one each; a failure shows its errors."""
    done = subprocess.run(
        [sys.executable, "-c", FORKS, *programs],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_heavy_modules_are_not_imported() -> None:
    """Modules that torch itself imports are not counted: they are what is there before."""
    programs = [
        "before = {*sys.modules}\n" + start + "print(*({*sys.modules} - before))"
        for start in ("import torch, ringcomm\n", GROUP)
    ]
    for line in outputs_of(*programs):
        found = line.split()
        assert "ringcomm.backend" in found
        wrong = [name for name in found if name.startswith(HEAVY)]
        assert not wrong


def test_public_names_are_found_without_importing_their_module() -> None:
    """Also by dir(), which completion in an interpreter uses."""
    program = """
import importlib, sys, torch, ringcomm
assert {"nn", "ops", "optim", "parallel", "planner", "integrations"} <= {*dir(ringcomm)}
assert "ringcomm.optim" not in sys.modules
assert {"pipeline", "zero"} <= {*dir(ringcomm.parallel)}
for name in MODULES:
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
    said = outputs_of(f"MODULES = {MODULES!r}\n{program}")
    assert said == ["module 'ringcomm' has no attribute 'optimizers'"]


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


def test_operators_used_directly_have_their_fakes_and_gradients() -> None:
    """With no import of ringcomm.ops; the namespace may have been looked up before ringcomm."""
    programs = [
        f"""
operators = torch.ops.ringcomm
{GROUP}
assert "ringcomm.ops" not in sys.modules
def direct(x):
    return operators.all_reduce(x, "sum", name) * 2
x = torch.ones(3, requires_grad=True)
{use}
got.sum().backward()
print(got.tolist(), x.grad.tolist())
"""
        for use in USES
    ]
    assert outputs_of(*programs) == ["[2.0, 2.0, 2.0] [2.0, 2.0, 2.0]"] * len(USES)


def test_an_exported_program_is_loaded_by_a_process_that_has_made_a_group(tmp_path: Path) -> None:
    file = str(tmp_path / "program.pt2")
    export = f"""
class Doubled(torch.nn.Module):
    def forward(self, x):
        return torch.ops.ringcomm.all_reduce(x, "sum", name) * 2
torch.export.save(torch.export.export(Doubled(), (torch.ones(3),)), {file!r})
"""
    load = f"print(torch.export.load({file!r}).module()(torch.ones(3)).tolist())"
    assert outputs_of(GROUP + export, GROUP + load) == ["[2.0, 2.0, 2.0]"]
