"""States of zero.shard(): by torch and torch.distributed.checkpoint, as files, and from meta."""

from __future__ import annotations

import copy
import io
import time
from datetime import timedelta
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from full_states import full_state, full_weights, load_parts, save_parts
from ranks import in_ranks, run_ranks
from rows import Row, Training, momentum
from steps import apply_steps
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.testing import assert_close as assert_equal
from torch.utils._pytree import tree_leaves, tree_map_only
from whole_optimizers import Muon64
from zero_models import (
    BUCKET_BYTES,
    STAGES,
    STEPS,
    Net,
    assert_close,
    batch,
    loss_of,
    make,
    make_optimizer,
    same,
    train,
    weights,
)

from ringcomm.errors import CollectiveTimeoutError
from ringcomm.parallel import get_state_dict as get_whole_state
from ringcomm.parallel import offload, zero
from ringcomm.parallel import set_state_dict as set_whole_state
from ringcomm.torch_names import backend_of, set_timeout


def continue_alone(values: dict[str, Any], kind: str, state: Any) -> dict[str, Tensor]:
    """torch's own optimizer in one process, from a whole state by names."""
    model = Net()
    optimizer = make_optimizer(model, kind)
    options = StateDictOptions(full_state_dict=True)
    set_state_dict(
        model, optimizer, model_state_dict=values, optim_state_dict=state, options=options
    )
    train(model, optimizer, steps=range(2, STEPS))
    return weights(model)


def by_torch(rank: int, stage: int, kind: str, options: dict[str, Any]) -> Any:
    """Between two sharded runs: in parts, flat, whole on all ranks, whole from rank 0."""
    model, optimizer = make(stage, kind, **options)
    train(model, optimizer, rank, 2, range(2))
    whole_only = StateDictOptions(full_state_dict=True)
    on_cpu = StateDictOptions(full_state_dict=True, cpu_offload=True)
    from_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    flat = StateDictOptions(flatten_optimizer_state_dict=True)
    ways = [(None, None), (flat, flat), (whole_only, whole_only), (on_cpu, from_0)]
    saved = []
    for save, _ in ways:
        states = get_state_dict(model, optimizer, options=save)
        saved.append([_copied(state) for state in states])
    assert (len(saved[3][1]) > 0) == (rank == 0)
    train(model, optimizer, rank, 2, range(2, STEPS))
    expected = weights(model)
    for (_, load), (values, state) in zip(ways, saved, strict=True):
        again, resumed = make(stage, kind, **options)
        set_model_state_dict(again, _copied(values), options=load)
        set_optimizer_state_dict(again, resumed, _copied(state), options=load)
        train(again, resumed, rank, 2, range(2, STEPS))
        assert same(weights(again), expected)
    leaves = [v for v in tree_leaves(saved[0][1]["state"]) if isinstance(v, Tensor)]
    assert all(isinstance(v, DTensor) for v in leaves if v.dim() > 0)
    return saved[3], expected


def _copied(value: Any) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), value)


@pytest.mark.parametrize(
    ("stage", "kind", "options"),
    [
        (1, "momentum", {}),
        (2, "adamw", {"param_dtype": torch.bfloat16, "loss_scale": "dynamic"}),
        (3, "adamw", {}),
        (1, "adamw", {"param_dtype": torch.bfloat16, "place": {"to": "cpu"}}),
        (3, "adamw", {"place": {"to": "cpu"}}),
    ],
)
def test_get_and_set_state_dict(stage: int, kind: str, options: dict[str, Any]) -> None:
    results = run_ranks(2, by_torch, stage, kind, options)
    (values, state), expected = results[0]
    if not options:
        assert_close(continue_alone(values, kind, state), expected, 2e-5)


def save_dcp(rank: int, place: tuple[int, int], kind: str, *where: Any) -> dict[str, Tensor]:
    """`place` is the number of ranks and the stage, `where` the folder and options."""
    world_size, stage = place
    model, optimizer = make(stage, kind)
    train(model, optimizer, rank, world_size, range(2))
    save_parts(model, optimizer, where[0], by_torch=True, options=where[1])
    train(model, optimizer, rank, world_size, range(2, STEPS))
    return weights(model)


def load_dcp(rank: int, place: tuple[int, int], kind: str, *where: Any) -> dict[str, Tensor]:
    world_size, stage = place
    model, optimizer = make(stage, kind)
    load_parts(model, optimizer, where[0], by_torch=True, options=where[1])
    train(model, optimizer, rank, world_size, range(2, STEPS))
    return weights(model)


@pytest.mark.parametrize(
    ("saved", "loaded", "kind", "is_flat"),
    [
        ((2, 2), (3, 3), "adamw", False),
        ((3, 3), (2, 1), "adamw", False),
        ((2, 2), (3, 3), "muon", False),
        ((2, 3), (3, 1), "muon", True),
    ],
)
def test_checkpoints_go_between_ranks_and_stages(
    saved: tuple[int, int], loaded: tuple[int, int], kind: str, is_flat: bool, tmp_path: Path
) -> None:
    """https://github.com/databricks/flashoptim/issues/3: the first step after a resume explodes.
    https://github.com/pytorch/pytorch/issues/124546: several optimizers and wrappers."""
    where = tmp_path, StateDictOptions(flatten_optimizer_state_dict=is_flat)
    expected = run_ranks(saved[0], save_dcp, saved, kind, *where)[0]
    for found in run_ranks(loaded[0], load_dcp, loaded, kind, *where):
        assert_close(found, expected, 2e-5)
    # And into torch's own optimizers.
    model = Net()
    plain = make_optimizer(model, kind)
    load_parts(model, plain, tmp_path, by_torch=True, no_dist=True, options=where[1])
    train(model, plain, steps=range(2, STEPS))
    assert_close(weights(model), expected, 2e-5)


@pytest.mark.parametrize("stage", STAGES)
@in_ranks(2)
def test_each_weight_has_its_number_of_steps(rank: int, stage: int) -> None:
    """Of a state in which they differ: torch's, with a weight that was frozen at first."""
    alone, model = Net(), Net()
    optimizer, plain = make_optimizer(alone, "adamw"), make_optimizer(model, "adamw")
    for step in range(4):
        loss_of(alone, *batch(step)).backward()
        if step < 3:
            alone.blocks[1].weight.grad = None
        apply_steps(optimizer)
    model.load_state_dict(weights(alone))
    plain.load_state_dict(optimizer.state_dict())
    sharded = zero.shard(model, plain, stage, bucket_bytes=BUCKET_BYTES)
    train(model, sharded, rank, 2, range(1))
    train(alone, optimizer, steps=range(1))
    assert_close(weights(model), weights(alone), 2e-5)
    steps = {name: float(s["step"]) for name, s in full_state(sharded)["state"].items()}
    expected: Any = get_state_dict(alone, optimizer)[1]["state"]
    assert steps == {name: float(s["step"]) for name, s in expected.items()}
    assert set(steps.values()) == {2.0, 5.0}


class Normed(nn.Module):
    """Buffers, a module of buffers alone, and a weight that two units share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.layers[2].weight = self.layers[0].weight
        self.norm = nn.BatchNorm1d(8)
        self.turns: Any = Turns()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.turns.angles
        out: Tensor = self.norm(x)
        return out


class Turns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.empty(8))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        angles: Any = self.angles
        if not angles.is_meta:
            angles.copy_(torch.arange(8.0))


def from_meta(rank: int, world_size: int, stage: int, offloads: bool) -> Any:
    """Values by reset_parameters(), rank 0's; then a whole state from rank 0."""
    with torch.device("meta"):
        model = Normed()
    torch.manual_seed(7 + rank)
    own: Any = torch.optim.AdamW(model.parameters(), 0.01)
    own = offload.Offloaded(own) if offloads else own
    optimizer = zero.shard(model, own, stage, offload_weights=offloads)
    tensors = [*model.parameters(), *model.buffers()]
    assert not any(tensor.is_meta for tensor in tensors)
    first = full_weights(model)
    model(torch.ones(4, 8)).square().sum().backward()
    optimizer.step()
    torch.manual_seed(3)
    whole = Normed()
    state = whole.state_dict() if rank == 0 else {}
    if offloads:
        set_whole_state(model, None, state, rank0_only=True)
    else:
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
    assert same(full_weights(model), weights(whole))
    assert torch.equal(model.turns.angles, torch.arange(8.0))
    return first


@pytest.mark.parametrize(("stage", "offloads"), [(1, False), (2, False), (3, False), (3, True)])
def test_from_the_meta_device(stage: int, offloads: bool) -> None:
    results = [first for n in (1, 3) for first in run_ranks(n, from_meta, n, stage, offloads)]
    for first in results:
        assert same(first, results[0])
    assert results[0]["layers.1.weight"].std() > 0.05


@in_ranks(2)
def test_what_the_meta_device_lacks(rank: int) -> None:
    odd = nn.ParameterList([torch.empty(3, device="meta")])
    for stage in (1, 2, 3):
        with pytest.raises(ValueError, match=r"has no reset_parameters\(\)"):
            zero.shard(odd, torch.optim.SGD(odd.parameters()), stage)
    with pytest.raises(ValueError, match=r"has no reset_parameters\(\)"):
        zero.shard(
            odd, offload.Offloaded(torch.optim.SGD(odd.parameters())), 3, offload_weights=True
        )
    dist.barrier()


def of_one_weight(model: Any) -> Muon64:
    for param in model.parameters():
        param.requires_grad_(param is model.first.weight)
    return Muon64([model.first.weight])


@pytest.mark.parametrize("stage", STAGES)
@in_ranks(3)
def test_ranks_without_a_weight_save_and_load(rank: int, stage: int) -> None:
    """torch steps an optimizer that has no state: on all ranks, or on none."""
    row = Row(optimizer=of_one_weight, num_ranks=3)
    first, again = (Training(row, f"zero {stage}", rank).begin() for _ in range(2))
    first.train(range(2))
    options = StateDictOptions(full_state_dict=True, strict=False)
    values, state = get_state_dict(first.model, first.optimizer, options=options)
    set_state_dict(
        *(again.model, again.optimizer),
        model_state_dict=values,
        optim_state_dict=state,
        options=options,
    )
    for each in (first, again):
        each.train(range(2, 4))
    assert same(again.weights(), first.weights())


@pytest.mark.parametrize("stage", [1, 2, 3])
@in_ranks(2)
def test_a_file_of_one_ranks_states_is_refused(rank: int, stage: int) -> None:
    """https://github.com/Lightning-AI/pytorch-lightning/issues/6387 and 10745,
    https://github.com/facebookresearch/fairscale/issues/8: rank 0 writes its part."""
    made = Training(Row(optimizer=momentum), f"zero {stage}", rank).begin()
    optimizer = made.optimizer
    made.train([0])
    with torch.inference_mode():
        state = optimizer.state_dict()
    words = r"momentum_buffer of this .* part of one rank.*\(model, optimizer, full=True\)"
    kept = copy.deepcopy(state)
    for value in (state, kept):
        with pytest.raises(RuntimeError, match=words):
            torch.save(value, io.BytesIO())
    ForkingPickler.dumps(state["state"][1])  # for the process of async_save()
    before = made.save()[1]["state"]
    made.train([1])
    optimizer.load_state_dict(kept)
    assert_equal(made.save()[1]["state"], before, rtol=0, atol=0)


@pytest.mark.parametrize("stage", [1, 3])
@in_ranks(1)
def test_one_rank_alone_writes_its_states(rank: int, stage: int) -> None:
    made = Training(Row(optimizer=momentum), f"zero {stage}", rank).begin()
    optimizer = made.optimizer
    made.train([0])
    torch.save(optimizer.state_dict(), file := io.BytesIO())
    expected = made.save()[1]["state"]
    made.train([1])
    file.seek(0)
    optimizer.load_state_dict(torch.load(file, weights_only=False))
    assert_equal(made.save()[1]["state"], expected, rtol=0, atol=0)


def checkpoints(rank: int, stage: int, way: str, folder: str) -> None:
    made = Training(Row(optimizer=momentum), f"zero {stage}", rank).begin()
    model, optimizer = made.model, made.optimizer
    made.train([0])
    wanted = made.save()

    def state() -> dict[str, Any]:
        return {
            "model": model.state_dict(),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }

    if way == "save":
        dcp.save(state(), checkpoint_id=folder)
    else:
        kind = dcp.state_dict_saver.AsyncCheckpointerType
        how = kind.PROCESS if way == "process" else kind.THREAD
        group: Any = dist.new_group(backend="gloo")
        options: dict[str, Any] = {"process_group": group, "async_checkpointer_type": how}
        if way == "shared":
            options["async_stager"] = dcp.staging.BlockingAsyncStager()
        dcp.async_save(state(), checkpoint_id=folder, **options).result()  # type: ignore[union-attr]
    made.train([1])
    dcp.load(found := state(), checkpoint_id=folder)
    values, states = get_whole_state(model, optimizer)
    dcp.load({"model": values, "optimizer": states}, checkpoint_id=folder)
    set_whole_state(model, optimizer, values, states)
    assert_equal(made.save()[0], wanted[0], rtol=0, atol=0)
    assert_equal(made.save()[1]["state"], wanted[1]["state"], rtol=0, atol=0)
    assert found["optimizer"]["state"]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(
    "way", ["save", "thread", "shared", pytest.param("process", marks=pytest.mark.slow)]
)
def test_torch_distributed_checkpoint_takes_the_rows(way: str, stage: int, tmp_path: Path) -> None:
    """https://github.com/pytorch/pytorch/issues/144657, https://github.com/pytorch/torchtitan/issues/3476:
    async_save() and the values that it copies."""
    run_ranks(2, checkpoints, stage, way, str(tmp_path / "saved"), fresh=way == "process")


@pytest.mark.parametrize("stage", [1, 3])
@in_ranks(2)
def test_all_ranks_refuse_a_state_that_one_cannot_load(rank: int, stage: int) -> None:
    """https://github.com/pytorch/pytorch/issues/125177: one rank has another state."""
    made = Training(Row(optimizer=momentum), f"zero {stage}", rank).begin()
    optimizer = made.optimizer
    made.train([0])
    state = optimizer.state_dict()
    cases: dict[str, Any] = {
        "rank 1: the state is from rank 0 of 2 and lacks": {**state, "rank": 0},
        "rank 1: KeyError": state if rank == 0 else {},
        "rank 0: .*NoneType": None if rank == 0 else state,
    }
    before = made.weights()
    for words, given in cases.items():
        with pytest.raises(ValueError, match=words):
            optimizer.load_state_dict(given)
    assert_equal(made.weights(), before, rtol=0, atol=0)
    optimizer.load_state_dict(state)


@in_ranks(2)
@pytest.mark.parametrize("stage", [1, 2])
def test_states_in_memory_are_copies(rank: int, stage: int) -> None:
    """https://github.com/huggingface/transformers/issues/17114: of one step, moments and count."""
    model, optimizer = make(stage, "adamw")
    train(model, optimizer, rank, 2, range(2))
    states: Any = get_state_dict(model, optimizer)[1]
    before = _copied(states)
    train(model, optimizer, rank, 2, range(2, 3))
    for name, state in before["state"].items():
        for key, value in state.items():
            assert torch.equal(full(states["state"][name][key]), full(value)), (name, key)


def full(value: Any) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def state_of_rank_0(rank: int, done: Path) -> None:
    model, optimizer = make(3, "muon")
    train(model, optimizer, rank, 2, range(1))
    group = dist.group.WORLD
    assert group is not None
    set_timeout(backend_of(group, torch.device("cpu")).options, timedelta(seconds=1.5))
    if rank == 0:
        with pytest.raises(CollectiveTimeoutError, match="rank 1"):
            optimizer.state_dict()
        done.touch()
    deadline = time.monotonic() + 60.0
    while not done.exists():
        assert time.monotonic() < deadline, "rank 0 hangs"
        time.sleep(0.05)


def test_a_collective_state_dict_of_one_rank_does_not_hang(tmp_path: Path) -> None:
    run_ranks(2, state_of_rank_0, tmp_path / "done", fresh=True)
