"""The host's part of losses and updates on a GPU, with a driver that launches nothing.

As a script it checks that a launch passes what Triton itself would pass, in cases that Triton
compiles for apart from each other. With --times it prints microseconds of CPU time of a loss and of
an update, on tensors of this CPU; of torch's operators beside them.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton_builds import launch_loss

from ringcomm.ops import cross_entropy, triton_kernels
from ringcomm.ops import weight_update_cuda as updates
from ringcomm.ops.losses import cross_entropy_cuda as losses

BF16 = torch.bfloat16
SEEN: list[tuple[Any, ...]] = []  # function, grid and arguments of the last launch


class Launcher:
    def __init__(self, src: Any, metadata: Any) -> None: ...

    def __call__(self, *given: Any) -> None:
        SEEN[:] = [(given[4], given[:3], *given[9:])]


class Driver:
    """Of a GPU without memory, whose functions are numbers."""

    launcher_cls = Launcher
    num_functions = 0

    @property
    def utils(self) -> Driver:
        return self

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 18}

    def load_binary(self, *image: Any) -> tuple[int, ...]:
        self.num_functions += 1
        return (1, self.num_functions, 32, 0, 1024)


def install() -> None:
    CUDABackend.make_cubin = lambda *_: b""
    triton.runtime.driver.set_active(Driver())


# ---- what a launch passes

NAMES: list[str] = []
# Those of launch_loss(): two or three operators of a forward pass, and one of a backward pass.
OF_A_LOSS = {
    "softmax_stats": ["stats"],
    "merge_gathered": ["merge"],
    "cross_entropy_loss": ["loss", "reduce"],
    "cross_entropy_grad and cross_entropy_grad_": ["grad", "grad"],
    "cross_entropy_and_grad_": ["reduce", "stats_and_grad", "loss", "reduce"],
    "scale_": ["scale"],
}


def check_launch(kernel: Any, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """As launch(), twice: it passes what Triton does, by the function that Triton chooses."""
    NAMES.append(kernel.fn.__name__.removesuffix("_kernel"))
    kernel[grid](*args, **constants)
    (wanted,) = SEEN
    for _ in range(2):
        SEEN.clear()
        triton_kernels.launch(kernel, grid, *args, **constants)
        (passed,) = SEEN
        for found, right in zip(passed, wanted, strict=True):
            assert found is right or (not isinstance(right, Tensor) and found == right)


def check_launches() -> None:
    losses.launch = updates.launch = check_launch
    launch_loss(1001, BF16, None, 0.0)
    assert list(itertools.chain(*OF_A_LOSS.values())) == NAMES
    launch_loss(64, torch.float32, torch.ones(64), 0.1)
    target = torch.zeros(3, dtype=torch.int64)
    for begin in (0, 1):
        given = (target[begin : begin + 2], None, 0, 64, -100, 1.0, 0.0, False, False)
        losses.softmax_stats(torch.zeros(2, 64), *given)
    # Addresses and strides at multiples of 16 or not, and numbers that are 1.
    for begin, width in ((0, 64), (1, 64), (8, 16), (8, 3), (8, 1), (3, 1)):
        for dtype in (BF16, torch.float32):
            rows = torch.zeros(2, 80, dtype=dtype)[:, begin : begin + width]
            losses.scale_(rows, torch.ones([]))
            losses.scale_(rows[:1], torch.ones([]))
            for weight_decay, seed in ((0.0, -1), (0.5, 7))[: 2 if dtype == BF16 else 1]:
                updates.sgd_update_(rows[0], rows[1], 0.1, weight_decay, 1.0, seed)
                updates.sgd_update_(rows[0], rows[1].float(), 0.1, weight_decay, 1.0, seed)
    assert "sgd" in NAMES


# ---- times


def microseconds(call: Callable[[], Any]) -> float:
    """CPU time of one call: the least of 40 turns, as others use the machine."""
    found = []
    for _ in range(40):
        begin = time.thread_time()
        for _ in range(100):
            call()
        found.append(time.thread_time() - begin)
    return min(found) * 1e4


def print_times() -> None:
    torch.set_num_threads(1)
    of_loss: Any = importlib.import_module("ringcomm.ops.losses.cross_entropy")
    of_loss._steps_for = lambda rows: losses
    weight, grad = torch.ones(4, 64, dtype=BF16), torch.ones(4, 64, dtype=BF16)
    logits, target = torch.zeros(4, 64, dtype=BF16), torch.zeros(4, dtype=torch.int64)
    leaf = logits.requires_grad_()

    def trained(loss_of: Callable[..., Tensor]) -> None:
        loss_of(leaf, target).backward()
        leaf.grad = None

    of_torch = torch.nn.functional.cross_entropy
    for name in ("with Triton's launch", "without a launch"):
        print(name)
        calls: dict[str, Callable[[], Any]] = {
            "add_": lambda: weight.add_(grad),
            "sgd_update_": lambda: updates.sgd_update_(weight, grad, 0.1, 0.0, 1.0, -1),
            "torch's cross_entropy": lambda: of_torch(leaf, target),
            "and backward": lambda: trained(of_torch),
            "cross_entropy": lambda: cross_entropy(leaf, target),
            "its backward, too": lambda: trained(cross_entropy),
        }
        for what, call in calls.items():
            call()
            print(f"  {what:22} {microseconds(call):6.1f}")
        losses.launch = updates.launch = lambda *args, **constants: None


if __name__ == "__main__":
    install()
    print_times() if "--times" in sys.argv else check_launches()
