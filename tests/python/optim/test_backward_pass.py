"""Backward passes as the engine runs them: nested, in threads, and ones that raise."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from ringcomm.backward_pass import (
    BackwardPass,
    OpenPasses,
    current_pass,
    in_backward,
    running_node,
    will_run,
)


class Log:
    """Enters the passes that a tensor's gradient comes through."""

    def __init__(self, *, fails: bool = False) -> None:
        self.passes: OpenPasses[int] = OpenPasses()
        self.entered: list[BackwardPass | None] = []
        self.ended: list[int] = []
        self.outer_nodes: list[bool] = []  # whether a node of an outer pass ran at the end
        self._fails = fails

    def watch(self, tensor: Tensor) -> Tensor:
        tensor.register_hook(lambda _: self._enter())
        return tensor

    def _enter(self) -> None:
        self.passes.enter(self._end, begin=self._begin)

    def _begin(self) -> int:
        self.entered.append(current_pass())
        return len(self.entered) - 1

    def _end(self, number: int) -> None:
        assert self.entered[number] not in self.passes._states
        if self._fails:
            raise ValueError("at the end")
        self.outer_nodes.append(running_node() is not None)
        self.ended.append(number)


def leaf() -> Tensor:
    return torch.ones(3, requires_grad=True)


def test_no_pass() -> None:
    assert current_pass() is None
    assert not in_backward()
    passes: OpenPasses[None] = OpenPasses()
    with pytest.raises(RuntimeError, match="no backward pass"):
        passes.enter()
    assert not passes


def test_a_pass_ends_once_and_has_its_own_state() -> None:
    log, x = Log(), leaf()
    for idx in range(2):
        a, b = log.watch(x * 2), log.watch(x * 3)  # both of one pass
        (a + b).sum().backward()
        assert log.ended == [*range(idx + 1)]
        assert not log.passes
    assert None not in log.entered
    assert log.entered[0] != log.entered[1]
    assert current_pass() is None


class BackwardInside(torch.autograd.Function):
    """Runs a backward pass of its own within the outer one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: Log) -> Tensor:
        ctx.log = log
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        outer = current_pass()
        with torch.enable_grad():
            ctx.log.watch(leaf() * 2).sum().backward()
        assert current_pass() == outer
        return grads[0], None


def test_a_nested_pass_ends_before_the_outer_one() -> None:
    log, x = Log(), leaf()
    y = log.watch(BackwardInside.apply(x, log) * 2)  # its gradient comes first
    log.watch(y * 2).sum().backward()
    assert len(log.entered) == 2
    assert log.entered[0] != log.entered[1]
    assert log.ended == [1, 0]
    assert log.outer_nodes == [True, False]
    assert not log.passes


def test_each_segment_of_a_reentrant_checkpoint_is_a_pass() -> None:
    log = Log()
    layers = nn.Linear(3, 3), nn.Linear(3, 3)
    log.watch(layers[0].weight)
    log.watch(layers[1].weight)
    x = leaf()
    for layer in layers:
        x = checkpoint(layer, x, use_reentrant=True)
    log.watch(x).sum().backward()
    assert len({*log.entered}) == 3
    assert log.ended == [1, 2, 0]
    assert log.outer_nodes == [True, True, False]


def raise_error(_: Tensor) -> None:
    raise KeyError("in a hook")


def test_a_pass_that_raises_stays_open_until_it_is_forgotten() -> None:
    log, x = Log(), leaf()
    bad = x * 2
    bad.register_hook(raise_error)
    with pytest.raises(KeyError):
        log.watch(bad * 2).sum().backward()
    assert log.ended == []
    assert log.passes
    log.watch(x * 2).sum().backward()  # another pass closes itself alone
    assert log.ended == [1]
    assert log.passes
    log.passes.forget()
    assert not log.passes


def test_an_outer_pass_goes_on_after_a_nested_one_has_raised() -> None:
    class Suppressed(BackwardInside):
        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            with torch.enable_grad():
                bad = leaf() * 2
                bad.register_hook(raise_error)
                loss = ctx.log.watch(bad * 2).sum()
            with pytest.raises(KeyError):
                loss.backward()
            return grads[0], None

    log = Log()
    log.watch(Suppressed.apply(leaf(), log) * 2).sum().backward()
    assert log.ended == [0]
    assert [*log.passes._states] == [log.entered[1]]


def test_a_pass_whose_end_raises_is_open() -> None:
    log = Log(fails=True)
    with pytest.raises(ValueError, match="at the end"):
        log.watch(leaf() * 2).sum().backward()
    assert [*log.passes._states] == log.entered


def test_forgotten_passes_end_as_well() -> None:
    log = Log()
    y = leaf() * 2
    y.register_hook(lambda _: log.passes.forget())
    log.watch(y * 2).sum().backward()
    assert log.ended == [0]
    assert not log.passes


def test_threads_have_passes_of_their_own() -> None:
    """The second pass begins and ends while the first one runs."""
    log, second_has_ended = Log(), threading.Event()
    first_runs = threading.Event()

    def wait(_: Tensor) -> None:
        first_runs.set()
        assert second_has_ended.wait(30)

    def first() -> None:
        y = leaf() * 2
        y.register_hook(wait)
        log.watch(y * 2).sum().backward()

    thread = threading.Thread(target=first)
    thread.start()
    assert first_runs.wait(30)
    assert current_pass() is None
    log.watch(leaf() * 2).sum().backward()
    assert log.ended == [1]
    assert log.passes
    second_has_ended.set()
    thread.join(30)
    assert log.ended == [1, 0]
    assert not log.passes


def test_will_run_tells_which_gradients_come() -> None:
    used, unused = leaf(), leaf()
    found: list[bool] = []
    y = used * 2
    nodes = [get_gradient_edge(x).node for x in (used, unused)]
    y.register_hook(lambda _: found.extend(map(will_run, nodes)))
    y.sum().backward()
    assert found == [True, False]
    with pytest.raises(RuntimeError):
        will_run(nodes[0])
