"""ringcomm without the packages that it does not declare: every import, and the calls around them.

`.ci/run bare` runs other tests in the same environment.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from rank_programs import run_program

ROOT = Path(__file__).parents[3]
BARE = ROOT / "tests" / "bare"
# Dependencies of ringcomm (numpy, torch) and of torch.
DECLARED = {"networkx", "numpy", "torch", "typing_extensions"}
OURS = {"_ringcomm", "kernels", "ringcomm"}
# What imports anything else, by package. Add to it only what the tests below show to say so.
OPTIONAL = {
    "accelerate": {"ringcomm/integrations/accelerate.py"},
    # Of a model of transformers.
    "transformers": {
        "ringcomm/integrations/transformers/pipeline.py",
        "ringcomm/integrations/transformers/training.py",
    },
    "triton": {"ringcomm/ops/triton_kernels.py"},
    "vllm": {"ringcomm/integrations/vllm.py"},
}


def imports(path: Path) -> set[str]:
    """The packages that a file imports, at its top or in a function."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            found.add(str(node.module).partition(".")[0])
    return found


def test_packages_that_are_not_declared_are_listed() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for path in (ROOT / "ringcomm").rglob("*.py"):
        for package in imports(path) - sys.stdlib_module_names - DECLARED - OURS:
            found[package].add(str(path.relative_to(ROOT)))
    assert found.pop("pytest") == {"ringcomm/testing/plugin.py"}  # which pytest imports
    assert dict(found) == OPTIONAL
    hidden = (BARE / "sitecustomize.py").read_text(encoding="utf-8")
    assert all(f'"{package}"' in hidden for package in OPTIONAL)


def said_without_them(program: str, *arguments: object) -> tuple[str, str]:
    """What a program prints, on standard output and error."""
    bare = {"PYTHONPATH": str(BARE)}
    (ended,) = run_program(program, *arguments, num_ranks=1, env=bare)
    assert ended.returncode == 0, ended.err
    return ended.out, ended.err


IMPORTS = """
import importlib, pkgutil, sys
import ringcomm

hidden, wants = sys.modules["sitecustomize"].HIDDEN, {}
for module in pkgutil.walk_packages(ringcomm.__path__, "ringcomm."):
    if module.name.rpartition(".")[2] == "__main__":
        continue
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        wants[module.name] = error.name.partition(".")[0]
assert not set(hidden) & {name.partition(".")[0] for name in sys.modules}
for name in sorted(wants):
    print(name, wants[name])
"""


@pytest.mark.slow
def test_every_module_is_imported_without_them() -> None:
    found = dict(line.split() for line in said_without_them(IMPORTS)[0].splitlines())
    kernels = {name: found.pop(name) for name in [*found] if name.startswith("ringcomm.kernels.")}
    assert set(kernels.values()) <= {"triton"}
    assert not found


CALLS = """
import sys, torch
import torch.distributed as dist
from torch import nn
from ringcomm import ops
from _ringcomm.start import run
from ringcomm.ops.losses.cross_entropy_cuda import scale_
from ringcomm.parallel import activations

model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
ops.cross_entropy(torch.randn(4, 9), torch.arange(4))
try:
    scale_(torch.ones(2, 2), torch.ones([]))
except ImportError as error:
    assert "pip install triton" in str(error)
else:
    raise AssertionError
dist.init_process_group("ringcomm", init_method="file://" + sys.argv[2], rank=0, world_size=1)
with activations.partition(min_elems=1, offload="cpu"):
    model(torch.ones(2, 8, requires_grad=True)).sum().backward()
dist.destroy_process_group()
assert run(["plan", "--model", "gpt2", "--gpus", "1", "--tokens", "4k"]) == 0
assert run(["doctor", "--world-size", "2", "--seconds", "0"]) == 0
quick = ["--seconds", "0", "--repeats", "0", "--json", sys.argv[2] + ".json"]
assert run(["tune", "--force", "--world-sizes", "2", "--sizes", "1k,4k", *quick]) == 0
try:
    run(["bench", "all_reduce"])
except SystemExit as stop:
    assert stop.code == 2
else:
    raise AssertionError
"""


@pytest.mark.slow
def test_calls_go_without_them_or_say_what_to_install(tmp_path: Path) -> None:
    _, errors = said_without_them(CALLS, tmp_path / "store")
    assert "tables need the package rich: pip install rich" in errors


# Every finder hides ringcomm._cuda, as in a build without the GPU part.
TESTS_WITHOUT_GPU_PART = """
import sys

class Hider:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *more):
        return None if name == "ringcomm._cuda" else self.finder.find_spec(name, *more)

sys.meta_path = [Hider(finder) for finder in sys.meta_path]
import pytest

sys.exit(pytest.main(["-q", "-rs", "-p", "no:cacheprovider", *sys.argv[2:]]))
"""


@pytest.mark.slow
def test_tests_of_the_gpu_part_are_left_out_by_name_and_others_run() -> None:
    needs_it = ROOT / "tests" / "python" / "device" / "test_device_losses.py"
    other = ROOT / "tests" / "python" / "ops" / "test_triton.py"
    chosen = f"{other}::test_cuda_has_every_operator_that_the_cpu_has"
    (ended,) = run_program(TESTS_WITHOUT_GPU_PART, needs_it, chosen, num_ranks=1)
    assert ended.returncode == 0, ended.out + ended.err
    assert "this build has no GPU part (ringcomm._cuda)" in ended.out
    assert re.search(r"\b1 passed, \d+ skipped", ended.out), ended.out
