"""The adapter for vLLM and the recipes of docs/how-to/serve.md for SGLang and DeepSpeed.

They run on stand-ins with the interfaces of these; the page says what ran with the real classes.
"""

from __future__ import annotations

import enum
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import in_ranks
from torch import Tensor

from ringcomm.integrations import vllm

PAGE = Path(__file__).resolve().parents[3] / "docs" / "how-to" / "serve.md"


def register(library: str) -> None:
    """Runs the recipe of a section of the page."""
    section = PAGE.read_text(encoding="utf-8").partition(f"## {library}\n")[2]
    found: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0], found)
    found["register"]()


@contextmanager
def modules(**found: Any) -> Iterator[None]:
    """Makes modules importable: names with __ for dots, and what they have."""
    stands_in: dict[str, ModuleType] = {}
    for name, members in found.items():
        parts = name.split("__")
        for end in range(1, len(parts) + 1):
            stands_in.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        vars(stands_in[".".join(parts)]).update(members)
    for name, module in stands_in.items():
        parent, _, own = name.rpartition(".")
        if parent:
            setattr(stands_in[parent], own, module)
    with mock.patch.dict(sys.modules, stands_in):
        yield


def test_without_the_library() -> None:
    is_on = mock.patch.dict("os.environ", {"VLLM_PLUGINS": "ringcomm"})
    with (
        is_on,
        mock.patch.dict(sys.modules, {"vllm": None}),
        pytest.raises(ImportError, match="vllm"),
    ):
        vllm.plugin()


# ---- vLLM


class CpuShm:
    """vLLM's own, which would load its operators."""


@in_ranks(2)
def test_vllm(rank: int) -> None:
    platform = SimpleNamespace(dist_backend="gloo")
    with modules(
        vllm__distributed__device_communicators__cpu_communicator={"_CPUSHMDistributed": CpuShm},
        vllm__platforms__cpu={"CpuPlatform": platform},
    ):
        from vllm.distributed.device_communicators import cpu_communicator

        with mock.patch.dict("os.environ", {"VLLM_PLUGINS": "other"}):
            vllm.plugin()
        assert cpu_communicator._CPUSHMDistributed is CpuShm
        with mock.patch.dict("os.environ", {"VLLM_PLUGINS": "other,ringcomm"}):
            vllm.plugin()
        chosen: Any = cpu_communicator._CPUSHMDistributed
    assert platform.dist_backend == "ringcomm"
    communicator = SimpleNamespace(
        device_group=dist.group.WORLD, unique_name="tp:0", ranks=[0, 1], rank=rank
    )
    module = chosen(communicator)
    assert isinstance(module, vllm.CpuDistributed)
    names: list[Any] = [None, None]
    dist.all_gather_object(names, chosen.make_group_name(communicator))
    assert names[0] == names[1]
    x = torch.full((3, 4), rank + 1.0, dtype=torch.bfloat16)
    module.all_reduce(x, group=communicator.device_group)
    assert x.tolist() == [[3.0] * 4] * 3
    parts = [torch.empty(2) for _ in range(2)] if rank == 1 else None
    module.gather(torch.full((2,), float(rank)), parts, dst=1, group=communicator.device_group)
    if parts is not None:
        assert torch.stack(parts).tolist() == [[0, 0], [1, 1]]
    out = torch.empty(4, 2)
    module.all_gather_into_tensor(out, torch.full((2, 2), float(rank)))
    assert out[:, 0].tolist() == [0, 0, 1, 1]
    sent = {"hidden": torch.arange(6.0).view(2, 3).t(), "empty": torch.empty(0, dtype=torch.int32)}
    if rank == 0:
        module.send_tensor_dict(sent, 1)
    else:
        received = module.recv_tensor_dict(0)
        assert received.keys() == sent.keys()
        assert all(torch.equal(received[name], value) for name, value in sent.items())


# ---- SGLang


class GroupCoordinator:
    """What SGLang's has for them."""

    def __init__(self, group: Any) -> None:
        self.device_group = group

    def all_reduce(self, input_: Tensor) -> Tensor:
        return input_ + 100

    def fused_allreduce_rmsnorm(
        self, input_: Tensor, residual_inp_: Tensor, weight_: Tensor, eps: float
    ) -> Any:
        return None


@in_ranks(2)
def test_sglang(rank: int) -> None:
    state = {
        "GroupCoordinator": GroupCoordinator,
        "is_shm_available": lambda dtype, world_size, local_size: True,
    }
    platform = type("CpuDeviceMixin", (), {"get_torch_distributed_backend_str": lambda _: "gloo"})
    with modules(
        sglang__srt__distributed__parallel_state=state,
        sglang__srt__platforms__cpu={"CpuDeviceMixin": platform},
    ):
        from sglang.srt.distributed import parallel_state

        register("SGLang")
        assert platform().get_torch_distributed_backend_str() == "ringcomm"
        assert not parallel_state.is_shm_available(torch.float32, 2, 2)
    group = GroupCoordinator(dist.group.WORLD)
    x = torch.full((3, 4), rank + 1.0)
    assert group.all_reduce(x) is x
    assert x.tolist() == [[3.0] * 4] * 3
    x, residual = torch.full((1, 4), rank + 1.0), torch.ones(1, 4)
    result: Any = group.fused_allreduce_rmsnorm(x, residual, torch.ones(4), 0.0)
    assert [part.tolist() for part in result] == [[[1.0] * 4], [[4.0] * 4]]


# ---- DeepSpeed


class ReduceOp(enum.Enum):
    """DeepSpeed's own names."""

    SUM = 0
    MAX = 2


class TorchBackend:
    """What DeepSpeed's has for it."""

    def _reduce_op(self, op: Any) -> Any:
        return getattr(dist.ReduceOp, op.name)

    def inference_all_reduce(self, tensor: Tensor, op: Any, group: Any = None) -> Any:
        raise AssertionError("DeepSpeed's own")


def build_shm_op() -> Any:
    raise AssertionError("compiles DeepSpeed's operator")


@in_ranks(3)
def test_deepspeed(rank: int) -> None:
    members = {"TorchBackend": TorchBackend, "build_shm_op": build_shm_op}
    with (
        modules(deepspeed__comm__torch=members),
        mock.patch.object(TorchBackend, "__module__", "deepspeed.comm.torch"),
    ):
        sys.modules["deepspeed.comm"].torch = torch  # type: ignore[attr-defined] # as DeepSpeed does
        register("DeepSpeed")
        assert sys.modules["deepspeed.comm.torch"].build_shm_op() is None
    group = dist.new_group([0, 1])
    engine: Any = TorchBackend()
    for op in (ReduceOp.SUM, dist.ReduceOp.SUM):
        x = torch.full((4, 4), rank + 1.0).t()[:, ::2]  # strided, which DeepSpeed's leaves as it is
        assert engine.inference_all_reduce(x, op) is x
        assert x.tolist() == [[6.0] * 2] * 4
    largest = torch.full((2,), rank, dtype=torch.int64)
    engine.inference_all_reduce(largest, ReduceOp.MAX)
    assert largest.tolist() == [2, 2]
    if rank < 2:
        pair = torch.ones(2)
        engine.inference_all_reduce(pair, ReduceOp.SUM, group)
        assert pair.tolist() == [2, 2]
