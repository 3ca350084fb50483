"""torch.ops.ringcomm: values, gradients against one process, torch.compile."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
from cases import slow
from machines import comes_true
from ranks import in_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode

import ringcomm
from ringcomm import ops

_ops = torch.ops.ringcomm


def group_name() -> str:
    return str(dist.group.WORLD.group_name)  # type: ignore[union-attr]


# What has no wrapper in ringcomm.ops.


def all_reduce_(tensor: Tensor) -> None:
    _ops.all_reduce_(tensor, "sum", group_name())


def broadcast(tensor: Tensor, src: int) -> Tensor:
    found: Tensor = _ops.broadcast(tensor, src, group_name())
    return found


def reduce(tensor: Tensor, dst: int) -> Tensor:
    found: Tensor = _ops.reduce(tensor, dst, "sum", group_name())
    return found


def broadcast_(tensor: Tensor, src: int) -> None:
    _ops.broadcast_(tensor, src, group_name())


def ring_all_reduce_(tensor: Tensor, group: Any = None) -> None:
    _ops.ring_all_reduce_(tensor, group.group_name if group else group_name())


# ---- opcheck


@in_ranks(2, timeout_s=120)
def test_opcheck(rank: int) -> None:
    """On all ranks at once: opcheck calls an operator a fixed number of times."""
    name = group_name()
    rows = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))

    def grad() -> Tensor:
        return rows.clone().requires_grad_()

    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (_ops.all_reduce, (grad(), "avg", name)),
        (_ops.all_reduce_, (rows.clone(), "sum", name)),
        (_ops.all_reduce_into, (rows, torch.empty_like(rows), "sum", name)),
        (_ops.reduce_scatter, (grad(), "sum", name)),
        (_ops.all_gather, (grad(), name)),
        (_ops.broadcast_, (rows.clone(), 0, name)),
        (_ops.broadcast, (grad(), 0, name)),
        (_ops.reduce, (grad(), 1, "sum", name)),
        (_ops.ring_all_reduce_, (rows.clone(), name)),
    ]
    for operator, args in calls:
        # What else it checks is in test_compile.
        tests = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(operator.default, args, test_utils=tests)


# ---- values and gradients: those of the sum of the ranks' losses, computed in one process


def stand_in(name: str, inputs: list[Tensor]) -> list[Tensor]:
    """What each rank gets, as differentiable operations on everybody's inputs."""
    world_size = len(inputs)
    total = torch.stack(inputs).sum(0)
    zeros = torch.zeros_like(total)
    return {
        "all_reduce": [total] * world_size,
        "all_reduce_avg": [total / world_size] * world_size,
        "reduce_scatter": list(total.chunk(world_size)),
        "reduce_scatter_avg": list((total / world_size).chunk(world_size)),
        "all_gather": [torch.cat(inputs)] * world_size,
        "broadcast": [inputs[1] + 0 * total] * world_size,  # all are used
        "reduce": [total if r == 1 else zeros for r in range(world_size)],
    }[name]


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "all_reduce": ops.all_reduce,
    "all_reduce_avg": lambda x: ops.all_reduce(x, "avg"),
    "reduce_scatter": ops.reduce_scatter,
    "reduce_scatter_avg": lambda x: ops.reduce_scatter(x, "avg"),
    "all_gather": ops.all_gather,
    "broadcast": lambda x: broadcast(x, 1),
    "reduce": lambda x: reduce(x, 1),
}


def loss_of(output: Tensor, rank: int) -> Tensor:
    """Different on each rank, and not linear."""
    weight = torch.linspace(1, 2, output.numel(), dtype=output.dtype).view(output.shape)
    return ((output + rank).sin() * weight * (rank + 1)).sum()


def random_inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    world_size = dist.get_world_size()
    return [
        torch.randn(2 * world_size, 3, generator=generator, dtype=torch.float64).requires_grad_()
        for _ in range(world_size)
    ]


@in_ranks((2, 3))
@pytest.mark.parametrize("name", OPS)
def test_values_and_gradients(rank: int, name: str) -> None:
    """In float64; the gradients, and that of a function of them."""
    reference = random_inputs()
    outputs = stand_in(name, [x * x for x in reference])
    total = sum(loss_of(output, r) for r, output in enumerate(outputs))
    assert isinstance(total, Tensor)
    grads = torch.autograd.grad(total, reference, create_graph=True)
    seconds = torch.autograd.grad(sum((g**2).sum() for g in grads), reference)  # type: ignore[arg-type]

    mine = random_inputs()[rank]
    square = mine * mine
    output = OPS[name](square)
    torch.testing.assert_close(output, outputs[rank], rtol=1e-12, atol=1e-12)
    assert torch.equal(square, mine * mine)
    (grad,) = torch.autograd.grad(loss_of(output, rank), mine, create_graph=True)
    torch.testing.assert_close(grad, grads[rank], rtol=1e-12, atol=1e-12)
    (second,) = torch.autograd.grad((grad**2).sum(), mine)
    torch.testing.assert_close(second, seconds[rank], rtol=1e-12, atol=1e-12)


@in_ranks((2, 3))
def test_calls_in_place(rank: int) -> None:
    rows = [x.detach() for x in random_inputs()]
    total = torch.stack(rows).sum(0)
    for call, expected in (
        (all_reduce_, total),
        (ring_all_reduce_, total),
        (lambda t: broadcast_(t, 0), rows[0]),
    ):
        tensor = rows[rank].clone()
        call(tensor)
        torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=1e-12)


@in_ranks(2)
def test_out(rank: int) -> None:
    """The version of what is overwritten; memory that is read and written in different orders."""
    for shape in ((), (3, 4)):
        x, total = torch.full(shape, rank + 1.0), torch.full(shape, 3.0)
        out = torch.empty(shape)
        version = out._version
        assert ops.all_reduce(x, out=out) is out
        assert out._version > version
        oracle.assert_equal(out, total)
        oracle.assert_equal(ops.all_reduce(x), total)
    corner = torch.zeros(4, 4)[:2, :2]
    corner.copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    ops.all_reduce(corner, out=corner.t())
    oracle.assert_equal(corner, 2 * torch.tensor([[1.0, 3.0], [2.0, 4.0]]))


# ---- refusals


@in_ranks(2)
def test_refusals(rank: int) -> None:
    x, base = torch.ones(4, requires_grad=True), torch.ones(5)
    ones, no_gradient = torch.ones, NotImplementedError
    wrong: list[tuple[Callable[[], Any], Any, str]] = [
        (lambda: ops.all_reduce(x, "max").sum().backward(), no_gradient, "max"),
        (lambda: all_reduce_(x), ValueError, "its input requires grad; use all_reduce, or"),
        (lambda: broadcast_(x, 0), ValueError, "use broadcast, or"),
        (lambda: ops.all_reduce(x, out=ones(4)), ValueError, "use all_reduce without out="),
        (lambda: ops.all_reduce(ones(4), out=ones(3)), ValueError, r"shape \[4\] into .*\[3\]"),
        (lambda: ops.all_reduce(ones(4), out=ones(4).double()), TypeError, "Float into Double"),
        (lambda: ops.all_reduce(base[:4], out=base[1:]), RuntimeError, "overlap|single memory"),
        (lambda: ops.all_reduce(ones(4), out=ones(1).expand(4)), ValueError, "location"),
        (lambda: ops.all_reduce(ones(2), "mean"), ValueError, "unknown reduction 'mean'"),
        (lambda: ops.reduce_scatter(ones(3)), ValueError, "multiple of 2"),
        (lambda: ops.all_gather(torch.tensor(1.0)), ValueError, "scalar"),
        (lambda: broadcast(ones(2), 5), ValueError, "5"),
        (lambda: ring_all_reduce_(x), ValueError, "use all_reduce, or"),
        (lambda: ops.all_reduce(ones(2), dist.ReduceOp.SUM), RuntimeError, "'reduce_op'"),  # type: ignore[arg-type]
        (lambda: broadcast(ones(2), "0"), RuntimeError, "'src'"),  # type: ignore[arg-type]
    ]
    for call, kind, words in wrong:
        with pytest.raises(kind, match=words):
            call()
    # Overwriting what a backward pass needs is an error there, not a wrong gradient.
    for overwrite in (all_reduce_, ring_all_reduce_, lambda t: broadcast_(t, 0)):
        y = torch.full((4,), rank + 2.0)
        loss = (x * y).sum()
        overwrite(y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    assert not ops.all_reduce(x.detach()).requires_grad
    with torch.no_grad():
        all_reduce_(x)
    assert x.tolist() == [2, 2, 2, 2]


@in_ranks(1, backend=None)
def test_no_group(rank: int) -> None:
    with pytest.raises(ValueError, match="init_process_group"):
        ops.all_reduce(torch.ones(2))


@in_ranks(2, fresh=True)
def test_over_another_backend(rank: int) -> None:
    """All but the explicit ring run over any backend, whose sockets go with its group."""
    gc.collect()
    num_fds = len(os.listdir("/proc/self/fd"))
    group = dist.new_group(backend="gloo")
    twos = torch.full((2,), 2.0)
    for _ in range(3):
        oracle.assert_equal(ops.all_reduce(torch.ones(2), group=group), twos)
        oracle.assert_equal(ops.all_reduce(torch.ones(2), group=group, out=torch.empty(2)), twos)
        oracle.assert_equal(ops.all_gather(torch.ones(1), group=group), torch.ones(2))
    with pytest.raises(ValueError, match="gloo"):
        ring_all_reduce_(torch.ones(2), group=group)
    assert len(os.listdir("/proc/self/fd")) > num_fds
    dist.destroy_process_group(group)
    del group
    gc.collect()
    # Gloo closes its sockets in a thread of its own.
    assert comes_true(lambda: len(os.listdir("/proc/self/fd")) == num_fds, 30)


# ---- with and without torch's dispatcher


class Noted(TorchDispatchMode):
    """A mode that sees the operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Sub(Tensor):
    """A subclass of tensors, whose operators torch hands to it."""


EAGER: dict[str, Callable[[Tensor], Tensor]] = {
    name: call for name, call in OPS.items() if not name.endswith("avg")
}


@in_ranks(2)
@pytest.mark.parametrize("name", EAGER)
def test_what_must_see_an_operator_does(rank: int, name: str) -> None:
    """Eager calls skip the dispatcher, except where something besides the kernel would run."""
    call, inputs = EAGER[name], [torch.tensor([r + 1.0, 10.0 * r]) for r in range(2)]
    x, expected = inputs[rank], stand_in(name, inputs)[rank]
    key = (name, "one_shot" if name == "all_reduce" else "direct")
    num_before = ringcomm.stats(dist.group.WORLD).get(key, {"num_calls": 0})["num_calls"]
    with Noted() as mode:
        oracle.assert_equal(call(x), expected)
    assert f"ringcomm.{name}.default" in mode.names
    sub = call(x.as_subclass(Sub))
    assert type(sub) is Sub
    oracle.assert_equal(sub.as_subclass(Tensor), expected)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        oracle.assert_equal(call(x), expected)
    assert f"ringcomm::{name}" in {event.key for event in profiler.key_averages()}
    with torch.autocast("cpu"), torch.inference_mode():
        result = call(x)
        assert result.is_inference()
        oracle.assert_equal(result.clone(), expected)
    oracle.assert_equal(call(x), expected)
    assert ringcomm.stats(dist.group.WORLD)[key]["num_calls"] == num_before + 5
    oracle.assert_equal(x, inputs[rank].clone())
    with FakeTensorMode() as fakes:
        fake = call(fakes.from_tensor(x))
        assert type(fake) is FakeTensor
        assert fake.shape == expected.shape
    graph = make_fx(lambda t: call(t) * 2)(x)
    assert any(name in str(node.target) for node in graph.graph.nodes)


@in_ranks(2)
def test_views_and_parameters(rank: int) -> None:
    x, total = torch.full((3,), rank + 1.0), torch.full((3,), 3.0)
    with pytest.raises(RuntimeError, match="functorch transforms"):  # as torch says it
        torch.func.grad(lambda t: ops.all_reduce(t).sum())(x)
    negative = torch.view_as_complex(torch.full((3, 2), rank + 1.0)).conj().imag
    assert negative.is_neg()
    oracle.assert_equal(ops.all_reduce(negative), -total)
    assert not ops.all_reduce(torch.nn.Parameter(x.clone()).detach()).requires_grad
    parameter = torch.nn.Parameter(x.clone())
    ops.all_reduce(parameter).sum().backward()
    assert parameter.grad is not None
    oracle.assert_equal(parameter.grad, torch.full((3,), 2.0))
    with pytest.raises(TypeError, match="cannot reduce Float8"):
        ops.all_reduce(torch.ones(2).to(torch.float8_e5m2))


# ---- torch.compile


def layer(x: Tensor, weight: Tensor) -> Tensor:
    gathered = ops.all_gather(x * 2)
    partial = torch.tanh(gathered @ weight)
    scattered = ops.reduce_scatter(partial)
    buffer = scattered.detach() + 1
    all_reduce_(buffer)
    broadcast_(buffer, 0)
    ring_all_reduce_(buffer)
    root = reduce(scattered, 0)
    return ops.all_reduce(scattered, "avg") + broadcast(root, 0) + buffer


@in_ranks(2, timeout_s=120)
def test_compile(rank: int) -> None:
    torch.manual_seed(rank)
    x, weight = torch.randn(4, 3), torch.randn(3, 5)

    def run(fn: Any) -> list[Tensor]:
        a, b = x.clone().requires_grad_(), weight.clone().requires_grad_()
        output = fn(a, b)
        (output**2).sum().backward()
        assert a.grad is not None
        assert b.grad is not None
        return [output.detach(), a.grad, b.grad]

    eager = run(layer)
    compiled = run(torch.compile(layer, fullgraph=True, backend="aot_eager"))
    for actual, expected in zip(compiled, eager, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)


def reduced_on(rank: int, x: Tensor, y: Tensor) -> Tensor:
    """Rank 0 does not use one sum, and uses the others in another order."""
    unused, first, second = ops.all_reduce(x), ops.all_reduce(x), ops.all_reduce(y)
    return second - first if rank == 0 else unused + second - 2 * first


@in_ranks(2)
@pytest.mark.parametrize("compiler", ["aot_eager", slow("inductor")])
def test_compiled_calls_are_those_of_the_program(rank: int, compiler: str) -> None:
    """None is dropped or moved on one rank alone."""
    torch._dynamo.reset()
    torch._inductor.config.compile_threads = 1
    compiled = torch.compile(reduced_on, backend=compiler)
    x, y = torch.full((4,), 1.0 + rank), torch.full((4,), 10.0 + 10 * rank)
    for _ in range(2):
        assert compiled(rank, x, y).tolist() == [27.0] * 4


@in_ranks(2)
def test_compiled_operators_without_a_gradient_are_refused(rank: int) -> None:
    x, y = torch.ones(4, requires_grad=True), torch.ones(4)
    name = dist.group.WORLD.group_name  # type: ignore[union-attr]
    calls: list[Callable[[Tensor], Any]] = [
        lambda x: ops.all_reduce(x * 2, out=y),
        lambda x: all_reduce_(x * 2),
        lambda x: torch.ops.ringcomm.broadcast_(x * 2, 0, name),
        lambda x: ops.all_reduce_add_rms_norm_(x * 2, torch.ones(4), torch.ones(4)),
        lambda x: torch.ops.ringcomm.sgd_update_(x * 2, torch.ones(4), 0.1, 0.0, 1.0),
    ]
    for call in calls:
        torch._dynamo.reset()
        with pytest.raises(Exception, match="requires grad"):
            torch.compile(call, backend="aot_eager")(x)
    with torch.no_grad():
        assert torch.compile(calls[0], backend="aot_eager")(x).tolist() == [4.0] * 4
