"""The Triton kernels run on this CPU, by the PTX that Triton compiles for GPUs (tests/ptx)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import loss_cases
import pytest
import translate as translator
import update_cases
from rank_programs import run_command
from triton_scripts import run, runs_ptx, start

from tests.judge.backends.triton import judge
from tests.judge.table import Fault, load

pytestmark = runs_ptx
NAMES = {"loss_cases": list(loss_cases.CHECKS), "update_cases": update_cases.NAMES}
# Every kernel once; the others run in the slow test.
FEW = {
    "loss_cases": ["beyond_32_bits", "no_class", "wrong_shards", "scale"],
    "update_cases": [
        "sgd-2500-bfloat16-bfloat16-random",
        "sgd-shift-split",
        "embedding-padded",
        "adalomo-row",
    ],
}
# From nothing a kernel takes some three seconds of a core, and there are some hundred.
TIMEOUT_S = 3600.0
CHECKS = ("arguments", "grid")
REFUSED = {
    "load": "a load of 4 bytes outside of all tensors",
    "store": "a store of 4 bytes outside of all tensors",
    "race": "a race: ",
    "opcode": "vabsdiff.s32.s32.s32",
}


def check_cases(script: str, arch: int, variant: str, names: list[str]) -> None:
    said = json.loads(run(f"{script}.py", str(arch), variant, *names, timeout_s=TIMEOUT_S))
    assert sorted(said) == sorted(names)
    assert {name: text for name, text in said.items() if text} == {}


@pytest.mark.slow
@pytest.mark.parametrize("script", FEW)
def test_some_cases(script: str) -> None:
    check_cases(script, 90, "exact", FEW[script])


def test_a_newer_ptx_and_what_is_not_known_are_said(tmp_path: Path) -> None:
    file = tmp_path / "kernel.ptx"
    file.write_text(".version 99.0\n.visible .entry kernel()\n{\n\tnew.b32 %r1, %r2;\n\tret;\n}\n")
    done = run_command(sys.executable, translator.__file__, file, tmp_path)
    assert done.returncode == 1
    assert f"{file}: PTX 99.0; what runs it was written for 9.1" in done.stderr
    assert "new.b32" in done.stderr
    assert not list(tmp_path.glob("*.cc"))


@pytest.mark.slow
@pytest.mark.parametrize("arch", [90, 80, 100])
@pytest.mark.parametrize("script", NAMES)
def test_kernels_do_what_the_cpu_and_the_oracle_do(script: str, arch: int) -> None:
    check_cases(script, arch, "exact", NAMES[script])


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["larger", "smaller"])
def test_approximate_instructions_may_be_wrong(variant: str) -> None:
    """By what PTX allows. Updates have none."""
    check_cases("loss_cases", 90, variant, NAMES["loss_cases"])


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKS)
def test_small_kernels(name: str) -> None:
    assert run("triton_small.py", name) == "right\n"


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_kernel_that_breaks_a_rule_is_refused(name: str) -> None:
    done = start("triton_small.py", name)
    assert done.returncode != 0, done.stdout
    assert REFUSED[name] in done.stderr


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the judge keeps from one fault to the next."""
    return tmp_path_factory.mktemp("judge")


@pytest.mark.slow
@pytest.mark.parametrize("fault", load("triton"), ids=lambda fault: fault.id)
def test_faults_in_kernels_are_found(fault: Fault, scratch: Path) -> None:
    """By wrong results, or by the machine."""
    assert judge(fault, scratch, TIMEOUT_S).noticed
