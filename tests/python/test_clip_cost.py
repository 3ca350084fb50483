"""The cost model of exact clipping against what a step holds and computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ringcomm.optim import Lomo, propose_clip_mode
from ringcomm.optim.gradients import LinearGradient

VOCAB, WIDTH, INNER = 96, 32, 80


class Net(nn.Module):
    """Weights of every kind: a table, matrices with a bias and without, a norm; tied or not."""

    def __init__(self, is_tied: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCAB, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if is_tied:
            self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.down(self.up(self.norm(self.table(ids))).relu())
        return nn.functional.cross_entropy(self.head(hidden).float(), ids)


def make_net(is_tied: bool = False, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net(is_tied).to(dtype)


def make_ids(num_tokens: int) -> Tensor:
    return torch.arange(num_tokens) % VOCAB


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [4, 24, 400])
def test_held_bytes_are_those_of_a_step(is_tied: bool, dtype: torch.dtype, num_tokens: int) -> None:
    """Lomo steps within the limit that is proposed, and not within one byte less."""
    found = propose_clip_mode(make_net(is_tied, dtype), num_tokens)
    assert (found.mode, found.held_bytes) == ("deferred", found.deferred_bytes)
    for missing in (0, 1):
        net = make_net(is_tied, dtype)
        limit = found.held_bytes - missing
        opt = Lomo(net, clip_grad_norm=1.0, clip_mode="deferred", max_held_bytes=limit)
        loss = net(make_ids(num_tokens))
        if missing:
            with pytest.raises(RuntimeError, match=f"{found.held_bytes} bytes"):
                loss.backward()
        else:
            loss.backward()
            opt.step()


def test_pairs_are_held_where_they_are_smaller() -> None:
    few, many = (propose_clip_mode(make_net(), num_tokens).weights for num_tokens in (4, 400))
    pairs = {weight.name for weight in few if weight.is_pair}
    assert pairs == {"table.weight", "up.weight", "down.weight", "head.weight"}
    assert not any(weight.is_pair for weight in many)
    assert {weight.name for weight in few} == {name for name, _ in Net(False).named_parameters()}


def flops_of(work: object, *args: object) -> int:
    """Multiplications and additions of the products that torch makes."""
    assert callable(work)
    with FlopCounterMode(display=False) as counter:
        work(*args)
    return int(counter.get_total_flops())


@pytest.mark.parametrize("num_tokens", [1, 16, 22, 23, 300])
def test_operations_of_the_norm(num_tokens: int) -> None:
    """22 tokens are the last that the Gram identity has fewer operations for."""
    model = nn.Linear(WIDTH, INNER, bias=False)
    (weight,) = propose_clip_mode(model, num_tokens).weights
    pair = LinearGradient(
        torch.randn(num_tokens, WIDTH), torch.randn(num_tokens, INNER), torch.float32
    )
    assert weight.norm_ops == flops_of(pair.square_sum)
    assert weight.is_gram == (num_tokens <= 22)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("num_tokens", [4, 400])
def test_operations_of_another_backward_pass(is_tied: bool, num_tokens: int) -> None:
    ids = make_ids(num_tokens)
    found = propose_clip_mode(make_net(is_tied), num_tokens)
    counts = []
    for clip in ({}, {"clip_grad_norm": 1.0, "clip_mode": "two_pass"}):
        net = make_net(is_tied)
        counts.append(flops_of(Lomo(net, **clip).backward, net(ids)))  # type: ignore[arg-type]
    # torch counts products alone.
    others = sum(
        weight.norm_ops
        for weight in found.weights
        if weight.forward_ops == 0 or (is_tied and weight.name == "table.weight")
    )
    assert counts[1] - counts[0] == found.two_pass_ops - others
    assert found.two_pass_ops > found.deferred_ops > others > 0


def test_checkpoints_repeat_the_forward_pass() -> None:
    net = make_net()
    plain = propose_clip_mode(net, 8)
    repeated = propose_clip_mode(net, 8, is_checkpointed=True)
    forward = flops_of(net, make_ids(8))
    assert repeated.two_pass_ops - plain.two_pass_ops == forward
    assert repeated.deferred_ops == plain.deferred_ops
    net.norm.gradient_checkpointing = True  # type: ignore[assignment]
    assert propose_clip_mode(net, 8) == repeated


def test_replicas_have_tensors() -> None:
    net = make_net()
    found = propose_clip_mode(net, 4, has_replicas=True)
    assert found.held_bytes == sum(param.nbytes for param in net.parameters())


def test_what_does_not_fit_takes_two_passes() -> None:
    net = make_net()
    held = propose_clip_mode(net, 24).held_bytes
    fits, not_quite = (propose_clip_mode(net, 24, limit) for limit in (held, held - 1))
    assert (fits.mode, fits.held_bytes, fits.extra_ops) == ("deferred", held, fits.deferred_ops)
    assert (not_quite.mode, not_quite.held_bytes) == ("two_pass", 0)
    assert not_quite.extra_ops == not_quite.two_pass_ops > fits.extra_ops
    assert not_quite.deferred_bytes == held
    assert "which fits" in str(fits)
    assert 'clip_mode="two_pass"' in str(not_quite)
    assert "is more than" in str(not_quite)
    assert "no limit" in str(propose_clip_mode(net, 24))


def test_weights_need_no_memory() -> None:
    with torch.device("meta"):
        found = propose_clip_mode(Net(False), 24)
    assert found == propose_clip_mode(make_net(), 24)


def test_autocast_has_smaller_pairs() -> None:
    model = nn.Linear(WIDTH, INNER, bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert propose_clip_mode(model, 4).held_bytes == 4 * (WIDTH + INNER) * 2


def test_frozen_weights_cost_nothing() -> None:
    net = make_net()
    net.up.requires_grad_(False)
    names = {weight.name for weight in propose_clip_mode(net, 8).weights}
    assert not names & {"up.weight", "up.bias"}
    net.requires_grad_(False)
    with pytest.raises(ValueError, match="no parameter that requires grad"):
        propose_clip_mode(net, 8)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [((0,), "num_tokens is positive, got 0"), ((8, 0), "max_held_bytes is positive or None")],
)
def test_wrong_arguments(arguments: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        propose_clip_mode(make_net(), *arguments)
