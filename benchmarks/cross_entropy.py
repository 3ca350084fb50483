"""Times cross-entropy, forward and backward, of ringcomm and other libraries, in turn.

With one rank it compares ringcomm, ringcomm with inplace=True ("in place") and inplace="forward"
("in forward"), the peers, and a copy of the logits as a floor. With several ranks it compares a
vocabulary sharded over the ranks, also in place, with one rank that has all of it, and with a copy
of each rank's logits. Gradients of some rows are verified against float64. On GPUs times are from
event to event.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import front_door
import harness
import torch
import torch.distributed as dist
from cells import BUSY
from harness import Bench, Options
from torch import Tensor
from torch.nn import functional

from ringcomm import ops
from ringcomm.measure.timing import Contender, open_default_group
from ringcomm.ops.losses import cross_entropy_cuda
from ringcomm.screen import byte_count

RINGCOMM, IN_PLACE, ONE_RANK, FLOOR = "ringcomm", "in place", "one rank", "copy"
IN_FORWARD = "in forward"
BY_TRITON = "triton"  # in forward, a peer of the kernels for clusters
# Rows whose gradient is verified; their float64 takes 8 bytes per class.
NUM_CHECKED_ROWS = 16
# Relative to the largest gradient of those rows.
TOLERANCES = {"float32": 1e-5, "float16": 1e-2, "bfloat16": 1e-2}

Loss = Callable[[Tensor, Tensor], Tensor]  # of logits and targets
Way = Callable[[Tensor], Tensor]  # from logits to their gradient


def check(options: Options) -> None:
    """Raises ValueError naming an invalid option; completes threads and peers."""
    if min(options.vocabularies) < options.world_size:
        raise ValueError("every rank needs at least one class")
    if options.peers and options.world_size > 1:
        raise ValueError("--peers are for one rank")
    options.peers = options.peers or ["torch"]
    cores = len(os.sched_getaffinity(0)) if options.world_size == 1 else 1
    options.threads = options.threads or cores


# ---- ways of one rank


def _backward(loss: Loss, target: Tensor, logits: Tensor) -> Tensor:
    leaf = logits.detach().requires_grad_()
    loss(leaf, target).backward()
    assert leaf.grad is not None
    return leaf.grad


class _Layer(torch.autograd.Function):
    """An identity whose output is not a leaf."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return logits.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _in_place(leaf: Tensor, target: Tensor, inplace: Any = True, **shard: Any) -> Tensor:
    loss: Tensor = ops.cross_entropy(_Layer.apply(leaf), target, inplace=inplace, **shard)
    return loss


def _in_forward_by_triton(leaf: Tensor, target: Tensor) -> Tensor:
    """In forward by the Triton kernels also where those for clusters serve."""
    with patch.object(cross_entropy_cuda, "HAS_CUDA", False):
        return _in_place(leaf, target, "forward")


def _compiled() -> Loss:
    return torch.compile(lambda logits, target: functional.cross_entropy(logits.float(), target))


def _liger() -> Loss:
    from liger_kernel.transformers.functional import liger_cross_entropy

    return liger_cross_entropy


def _quack() -> Loss:
    from quack.cross_entropy import cross_entropy

    return partial(cross_entropy, reduction="mean")


PEERS: dict[str, Callable[[], Loss]] = {
    RINGCOMM: lambda: ops.cross_entropy,
    IN_PLACE: lambda: _in_place,
    IN_FORWARD: lambda: partial(_in_place, inplace="forward"),
    BY_TRITON: lambda: _in_forward_by_triton,
    "torch": lambda: functional.cross_entropy,
    "compile": _compiled,
    "liger": _liger,
    "quack": _quack,
}


def _is_there(name: str) -> bool:
    """Whether a peer's packages are; says which is not."""
    try:
        PEERS[name]()
    except ImportError as error:
        print(f"not available: {name}: {error}", flush=True)
        return False
    return True


# The gradient that an in-place way leaves in the logits.
OVERWRITING = (IN_PLACE, IN_FORWARD, BY_TRITON, "liger")


# ---- the vocabulary over several ranks


def _shared_ways(columns: slice, target: Tensor, vocab_size: int) -> dict[str, Way]:
    """Ways with a sharded vocabulary, and one with all columns on the first rank."""
    shard: dict[str, Any] = {"group": dist.group.WORLD, "vocab_size": vocab_size}
    shard["vocab_start"] = columns.start
    return {
        RINGCOMM: partial(_backward, partial(ops.cross_entropy, **shard), target),
        IN_PLACE: partial(_backward, partial(_in_place, **shard), target),
        ONE_RANK: partial(_backward, ops.cross_entropy, target),
    }


# ---- verification and memory


def _count_wrong(logits: Tensor, target: Tensor, columns: slice, gradient: Tensor) -> int:
    """Counts wrong gradient elements of the first rows (of "mean"); ``logits`` have all columns."""
    rows = slice(0, NUM_CHECKED_ROWS)
    expected = torch.softmax(logits[rows].double(), -1)
    expected -= functional.one_hot(target[rows], logits.shape[1])
    expected /= len(target)
    limit = TOLERANCES[str(logits.dtype).removeprefix("torch.")] * float(expected.abs().max())
    found = gradient[rows].double()
    return int((~torch.isclose(found, expected[:, columns], rtol=0, atol=limit)).sum())


def _status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    raise ValueError(f"/proc/self/status has no {field}")


def peak_extra_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The peak of a call's memory beyond the memory in use before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins here
    before = _status_bytes("VmRSS")
    call()
    return max(0, _status_bytes("VmHWM") - before)


# ---- a point


@dataclass
class _Inputs:
    """Logits that a way may overwrite, from a seed; the same on all ranks."""

    logits: Tensor
    target: Tensor
    kept: Tensor  # the rows that are verified

    def restore(self, part: Tensor, columns: slice) -> None:
        """Gives the first rows of all logits, and of a part of the columns, what they had."""
        self.logits[: len(self.kept)] = self.kept
        part[: len(self.kept)] = self.kept[:, columns]


def _inputs(num_tokens: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> _Inputs:
    torch.manual_seed(1)
    logits = torch.empty(num_tokens, vocab_size, dtype=dtype, device=device).normal_()
    target = torch.randint(0, vocab_size, (num_tokens,), device=device)
    return _Inputs(logits, target, logits[:NUM_CHECKED_ROWS].clone())


def _contenders(
    bench: Bench, peers: list[str], inputs: _Inputs
) -> tuple[dict[str, Contender], dict[str, int], dict[str, int]]:
    """The contenders of a point; wrong elements and memory by way. Collective."""
    team, vocab_size = bench.team, inputs.logits.shape[1]
    columns = slice(*ops.shard_range(vocab_size, team.world_size, team.rank))
    mine = inputs.logits
    names = (RINGCOMM, IN_PLACE, IN_FORWARD, *peers)
    ways: dict[str, Way] = {n: partial(_backward, PEERS[n](), inputs.target) for n in names}
    if team.world_size > 1:
        ways = _shared_ways(columns, inputs.target, vocab_size)
        mine = inputs.logits[:, columns].contiguous()
    contenders, wrong, memory = {}, {}, {}
    for name, way in ways.items():
        is_idle = name == ONE_RANK and team.rank != 0
        logits = inputs.logits if name == ONE_RANK else mine
        found = slice(0, vocab_size) if name == ONE_RANK else columns
        inputs.restore(mine, columns)
        bad = 0
        if not is_idle:
            gradient = way(logits).clone() if name in OVERWRITING else way(logits)
            inputs.restore(mine, columns)
            bad = _count_wrong(inputs.logits, inputs.target, found, gradient)
            del gradient
        call: Callable[[], Any] = (lambda: None) if is_idle else partial(way, logits)
        wrong[name] = sum(team.share(bad))
        memory[name] = max(team.share(peak_extra_bytes(call, logits.device)))
        contenders[name] = bench.contender(call)
    copy: Callable[[], Any] = partial(torch.empty_like(mine).copy_, mine)
    contenders[FLOOR] = bench.contender(copy)
    wrong[FLOOR], memory[FLOOR] = 0, 0
    return contenders, wrong, memory


def run_rank(bench: Bench, options: Options) -> None:
    """Every point in turn; rank 0 reports each one's records."""
    if bench.team.world_size > 1:
        open_default_group(bench.team, "ringcomm")
    torch.set_num_threads(options.threads)
    peers = [name for name in options.peers if _is_there(name)]
    for dtype, vocab_size in product(options.dtypes, options.vocabularies):
        inputs = _inputs(options.tokens, vocab_size, getattr(torch, dtype), bench.device)
        contenders, wrong, memory = _contenders(bench, peers, inputs)
        point = {"num_tokens": options.tokens, "vocab_size": vocab_size, "dtype": dtype}
        records = bench.race(contenders, RINGCOMM, wrong, **point)
        bench.report([r | {"extra_bytes": memory[r["way"]]} for r in records])
        del inputs, contenders


PROGRAM = harness.Program(
    **vars(front_door.CROSS_ENTROPY),
    kind="cross_entropy",
    rank=run_rank,
    check=check,
    facts=lambda options: {"num_threads": options.threads},
    columns=[
        *("type", "classes", "way", "p50 µs", "p99 µs"),
        ("memory", lambda r: byte_count(r["extra_bytes"] >> 20 << 20)),
        *("time / ringcomm's", "others %"),
    ],
    section=("dtype", "vocab_size"),
    caption=f"Memory: the most in use besides the logits. * {BUSY}.",
    title=lambda options: f"{options.tokens} tokens, {options.world_size} rank(s)",
)
run = PROGRAM.run
