"""zero.shard(): steps on other numbers of ranks, bits, overflow, clipping and 16-bit formats."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from full_states import full_state, full_weights
from ranks import in_ranks
from rows import PLACES, ZERO, Row, Training, cases_of, check, moves, muon, overflows, trained_by
from steps import apply_steps, train_step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from whole_optimizers import Averaged
from zero_models import (
    BUCKET_BYTES,
    STAGES,
    STEPS,
    Net,
    assert_alike,
    assert_close,
    batch,
    loss_of,
    make,
    make_optimizer,
    same,
    sent_bytes,
    train,
    train_alone,
    train_on_halves,
    weights,
)

from ringcomm.parallel import offload, zero

CLIPPED, SCALED = {"clip_grad_norm": 0.1}, {"loss_scale": 1024.0}


def on_a_mesh(made: Training) -> dict[str, Any]:
    mesh = init_device_mesh(made.device.type, (made.row.num_ranks,))
    return {"mesh": mesh, "bucket_bytes": BUCKET_BYTES, "clip_grad_norm": 0.1}


# test_pairs.py has any two features together on two ranks; here are other numbers of ranks.
ROWS = {
    f"{num_ranks} over {backend}, {kind}": Row(
        model=partial(Net, is_tied=is_tied),
        optimizer=partial(make_optimizer, kind=kind),
        systems=(f"zero {stage}",),
        options=options if callable(options) else {"bucket_bytes": BUCKET_BYTES, **options},
        num_parts=num_parts,
        num_ranks=num_ranks,
        backend=backend,
        # How much sums of three or four ranks' gradients may differ; AdamW amplifies it.
        atol=2e-5 if kind == "adamw" else 1e-6,
    )
    for num_ranks, backend, stage, kind, options, num_parts, is_tied in (
        (1, "ringcomm", 1, "adamw", CLIPPED, 1, False),
        (1, "ringcomm", 2, "momentum", {}, 2, False),
        (1, "ringcomm", 3, "momentum", SCALED, 1, False),
        (2, "gloo", 1, "momentum", on_a_mesh, 1, False),
        (2, "gloo", 2, "adamw", {**CLIPPED, **SCALED}, 2, False),
        (2, "gloo", 3, "adamw", SCALED, 2, False),
        (2, "ringcomm", 2, "muon", CLIPPED, 1, False),
        (3, "ringcomm", 3, "muon", {}, 1, False),
        (3, "ringcomm", 1, "adamw", SCALED, 2, True),
        (3, "ringcomm", 2, "adamw", {"bucket_bytes": 1 << 20}, 1, False),
        (3, "ringcomm", 3, "momentum", on_a_mesh, 1, False),
        (4, "ringcomm", 2, "momentum", CLIPPED, 1, True),
        (4, "ringcomm", 3, "adamw", {}, 1, True),
    )
}
ROWS |= {
    f"overflow in {where or 'the loss'}": Row(
        partial(overflows, where),
        optimizer=partial(make_optimizer, kind="adamw"),
        systems=systems,
        options={"loss_scale": "dynamic"},
        atol=2e-5,
    )
    for where, systems in (
        ("last.bias", ("zero 1", "zero 2")),
        ("first.weight", ("zero 2",)),
        ("", ("zero 3", "infinity")),
    )
}
ROWS |= {
    f"weights of {dtype}": Row(
        model=partial(Net, dtype=dtype),
        optimizer=partial(make_optimizer, kind="momentum"),
        systems=("zero 1", "zero 2"),
        options={"bucket_bytes": BUCKET_BYTES, "clip_grad_norm": 1.0, **more},
        atol=1e-2,
    )
    for dtype, more in ((torch.bfloat16, {}), (torch.float16, SCALED))
}
ROWS |= {
    "gathered as bfloat16": Row(
        optimizer=partial(make_optimizer, kind="momentum"),
        systems=("zero 3",),
        options={"param_dtype": torch.bfloat16, "clip_grad_norm": 1.0},
        atol=1e-2,
    ),
    "to the CPU and back": Row(
        moves, optimizer=partial(make_optimizer, kind="adamw"), systems=ZERO, atol=2e-5
    ),
}


@pytest.mark.parametrize(("name", "system", "world_size", "backend"), cases_of(ROWS))
@in_ranks()
def test_rows(
    rank: int, device: str, name: str, system: str, world_size: int, backend: str
) -> None:
    check(rank, ROWS[name], system, device)


@pytest.mark.parametrize(
    ("stage", "backend"),
    [(1, "ringcomm"), (2, "ringcomm"), (3, "ringcomm"), (1, "gloo"), (3, "gloo")],
)
@in_ranks(2)
def test_two_ranks_have_the_bits_of_one(rank: int, stage: int, backend: str) -> None:
    model, optimizer = make(stage)
    train(model, optimizer, rank, 2)
    alone = Net()
    train_on_halves(alone, [make_optimizer(alone, "momentum")], STEPS)
    assert same(weights(model), weights(alone))


# ---- no_sync(), overflow and clipping


@in_ranks(2)
def test_stage_3_refuses_a_step_that_lacks_gradients(rank: int) -> None:
    """At stage 3 fully_shard keeps them, and would go on without them in silence."""
    model, optimizer = make(3)
    before = weights(model)
    with optimizer.no_sync():
        loss_of(model, *batch(0, rank, 2)).backward()
    with pytest.raises(RuntimeError, match=r"no_sync\(\) were not reduced at stage 3"):
        optimizer.step()
    assert same(weights(model), before)
    loss_of(model, *batch(1, rank, 2)).backward()
    optimizer.step()
    alone = Net()
    plain = make_optimizer(alone, "momentum")
    train_step(loss_of(alone, *batch(0)) + loss_of(alone, *batch(1)), plain)
    optimizer.zero_grad()
    with optimizer.no_sync():
        loss_of(model, *batch(2, rank, 2)).backward()
    optimizer.zero_grad()  # drops it
    for net, each in ((model, optimizer), (alone, plain)):
        loss_of(net, *(batch(3, rank, 2) if net is model else batch(3))).backward()
        each.step()
    assert_close(weights(model), weights(alone))


@pytest.mark.parametrize("stage", STAGES)
@in_ranks(2)
def test_clipping_nan_is_an_error_on_all_ranks(rank: int, stage: int) -> None:
    """By the option and by the method; then steps that are right."""
    model, optimizer = make(stage, clip_grad_norm=1.0)
    before = weights(model)
    with pytest.raises(ValueError, match="max_norm must be positive"):
        optimizer.clip_grad_norm_(0)
    assert optimizer.clip_grad_norm_(1.0) == 0
    x, y = batch(0, rank, 2)
    for call in (optimizer.step, lambda: optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)):
        loss_of(model, x, y * (float("nan") if rank == 1 else 1)).backward()
        with pytest.raises(
            RuntimeError, match="norm of the gradients is nan; no weight has been written"
        ):
            call()
    optimizer.step()
    assert same(weights(model), before)
    train(model, optimizer, rank, 2)
    assert_close(weights(model), train_alone("momentum", clip=1.0))


@pytest.mark.parametrize(
    ("world_size", "stage", "scale"), [(2, 1, None), (3, 2, 1024.0), (3, 3, 1024.0)]
)
@in_ranks()
def test_the_optimizer_clips(rank: int, world_size: int, stage: int, scale: float | None) -> None:
    """After two of three backward passes, some in no_sync(), not the same ones on all ranks."""
    model, optimizer = make(stage, loss_scale=scale)
    alone, norms = Net(), []
    plain = make_optimizer(alone, "momentum")
    for step in range(STEPS):
        for part in range(3):
            loss = optimizer.scale(loss_of(model, *batch(3 * step + part, rank, world_size)))
            if stage < 3 and part == rank:
                sent = sent_bytes()
                with optimizer.no_sync():
                    loss.backward()
                assert sent_bytes() == sent
            else:
                loss.backward()
            loss_of(alone, *batch(3 * step + part)).backward()
            if part == 1:
                seen = optimizer.clip_grad_norm_(math.inf)  # looks, and clips nothing
                norms.append(optimizer.clip_grad_norm_(0.1))
                assert torch.equal(seen, norms[-1])
                norm = nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
                torch.testing.assert_close(norms[step], norm, rtol=1e-4, atol=0)
        apply_steps(optimizer, plain)
    assert_close(weights(model), weights(alone), 2e-6)
    before = weights(model)
    with optimizer.no_sync():
        loss_of(model, *batch(0, rank, world_size)).backward()
    optimizer.zero_grad()
    optimizer.step()
    assert same(weights(model), before)
    assert_alike({"norms": torch.stack(norms)})


def accumulate(rank: int, stage: int, reduce_dtype: torch.dtype | None, how: str) -> list[float]:
    """Gradients of 256, and then eight of 1, which 16 bits round off; the ranks' differ by 1."""
    model = nn.Linear(1, 4, bias=False)
    options: dict[str, Any] = {"reduce_dtype": reduce_dtype}
    optimizer: Any = torch.optim.SGD(model.parameters(), 1.0)
    if how == "param_dtype":
        options["param_dtype"] = torch.bfloat16
    else:
        model.to(torch.bfloat16)
    if how == "offload":
        optimizer = offload.Offloaded(torch.optim.SGD(model.parameters(), 1.0))
        options["offload_weights"] = stage == 3
    with torch.no_grad():
        model.weight.zero_()
    sharded = zero.shard(model, optimizer, stage, **options)
    for value in [256.0 + 2 * rank, *[1.0] * 8]:
        model(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
    sharded.step()
    if how == "param_dtype" and stage == 3:
        return [float(value) for value in -weights(model)["weight"].flatten()]
    state = full_state(sharded)["state"]["weight"]
    return [float(value) for value in -state["master"].flatten()]


@pytest.mark.parametrize(
    ("stage", "how"),
    [(1, "param_dtype"), (3, "param_dtype"), (2, "own"), (2, "offload"), (3, "offload")],
)
@in_ranks(2)
def test_micro_batches_add_up_in_float32(rank: int, stage: int, how: str) -> None:
    assert accumulate(rank, stage, None, how) == [257.0 + 8] * 4
    # The control: in 16 bits, as asked for, something is lost.
    assert max(accumulate(rank, stage, torch.bfloat16, how)) < 265


@pytest.mark.parametrize(("stage", "how"), [(1, "plain"), (2, "reduced"), (3, "offload_weights")])
@in_ranks(2)
def test_offloaded_states_see_gradients_of_float16(rank: int, stage: int, how: str) -> None:
    """Under a loss scale, 1e-8 and 1e-7: of float16 the first is 0, the second has two bits."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    options: dict[str, Any] = {"loss_scale": 2.0**14}
    if how == "offload_weights":
        model.half()
        options["offload_weights"] = True
    else:
        options["param_dtype"] = torch.float16
    own = offload.Offloaded(
        torch.optim.AdamW(model.parameters(), 0.01, eps=1e-12, weight_decay=0.0)
    )
    if how == "reduced":
        options["reduce_dtype"] = torch.float16
    sharded = zero.shard(model, own, stage, **options)
    for _ in range(2):
        # The loss is of float32, so that the scale comes before the gradients get 16 bits.
        x = torch.tensor([[1e-4, 1e-3]], dtype=torch.float16)
        train_step(sharded.scale(model(x).float().sum() * 1e-4), sharded)
    state = full_state(sharded)["state"]["weight"]
    alone = nn.Linear(2, 1, bias=False)
    nn.init.ones_(alone.weight)
    optimizer = torch.optim.AdamW(alone.parameters(), 0.01, eps=1e-12, weight_decay=0.0)
    for _ in range(2):
        alone.weight.grad = torch.tensor([[1e-8, 1e-7]])
        optimizer.step()
    expected = optimizer.state[alone.weight]["exp_avg"].flatten()
    torch.testing.assert_close(state["exp_avg"].flatten(), expected, rtol=5e-3, atol=0)
    master = state["master"].flatten()
    torch.testing.assert_close(master, alone.weight.detach().flatten(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("system", "width", "is_offloaded"),
    [
        *itertools.product(("zero 1", "zero 2", "zero 3"), (13, 129), (False, True)),
        ("infinity, file", 129, True),
    ],
)
@in_ranks(2)
def test_matrices_have_the_bits_of_one_process(
    rank: int, system: str, width: int, is_offloaded: bool
) -> None:
    """Iterations in bfloat16, too, because a matrix is on one rank.

    Wide ones for a step: AdamW by chunks rounds otherwise than torch's, as gradients show.
    """
    kind = partial(torch.optim.Muon, lr=0.02)
    alone, model = Net(width=width), Net(width=width)
    num_steps = STEPS if width == 13 else 1
    train_on_halves(alone, muon(alone, kind), num_steps)
    given = muon(model, kind)
    if is_offloaded:
        given[0] = offload.Offloaded(given[0], **PLACES["file"])
    train(model, trained_by(system, model, given), rank, 2, range(num_steps))
    expected = {name: x for name, x in full_weights(alone).items() if x.dim() == 2}
    assert same(full_weights(model), expected)


@in_ranks(2)
def test_masters_stay_in_the_state_of_each_mode(rank: int) -> None:
    model = Net()
    optimizer = zero.shard(model, Averaged(model.parameters()), 1, param_dtype=torch.bfloat16)
    optimizer.train()
    train(model, optimizer, rank, 2, range(1))
    for change in (optimizer.eval, optimizer.train):
        change()
        assert all("master" in state for state in optimizer.state.values() if state)
