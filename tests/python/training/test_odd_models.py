"""Models and losses of public reports about sharded training: rows of rows.py."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import odd_models as odd
import pytest
import torch
from ranks import in_ranks
from rows import (
    SHARDED,
    STAGES,
    ZERO,
    Blocks,
    Row,
    Training,
    adamw,
    cases_of,
    check,
    momentum,
    muon,
    square,
    squared,
)
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

# ---- rows


def two_passes(made: Training) -> None:
    for step in (0, 2, 4):
        made.backward(step)
        made.backward(step + 1)
        made.step()


def save_before_the_first_step(made: Training) -> None:
    if not made.is_alone:
        made.save()
    made.train(range(2))
    made.load_own_state()
    made.reload({"zero 1": "zero 2", "zero 2": "zero 1"}.get(made.system, ""))
    made.train(range(2, 4))


def adamw_of_last(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.last.parameters(), 0.02, eps=1e-3)


def train_stored(made: Training) -> None:
    for step in range(3):
        made.backward(step)
        assert made.model.dtypes == (torch.float8_e4m3fn, torch.uint8)
        made.step()


def clipped(made: Training) -> None:
    for step in range(3):
        made.backward(step)
        made.clip(0.5)
        made.step()
    if made.system == "zero 3":
        with made.optimizer.no_sync():
            made.backward(3)
        made.optimizer.zero_grad()


def generates(made: Training) -> Tensor:
    """The tokens before each step."""
    if not made.is_alone:  # units that share a module are the root's; generate() gathers it
        parts = made.model.named_modules()
        assert [name for name, part in parts if isinstance(part, FSDPModule)] == ["", "layers.2"]
    found = []
    for step in range(3):
        ids = torch.randint(6, (4, 5), generator=torch.Generator().manual_seed(step))
        found.append(made.model.generate(ids, number=3))
        for rank in made.ranks:
            mine = ids.chunk(2)[rank]
            loss = nn.functional.cross_entropy(made.model(mine).flatten(0, 1), mine.flatten())
            (loss / len(made.ranks)).backward()
        made.step()
    return torch.cat(found)


def beside_another(made: Training) -> None:
    odd.ByName().float()  # has a part of a sharded model
    made.train(range(2))


def shown(made: Training) -> Tensor:
    made.train([0])
    value: Tensor = made.model.shown.clone()
    return value


of_blocks = partial(Row, model=Blocks, loss=squared)
# At which stages a row is not quick: it has been right there all along.
FLAT = STAGES[:2]
SLOW: Mapping[str, Any] = {"systems": (), "slow": ZERO}
INFINITY: Mapping[str, Any] = {"systems": ("infinity",), "slow": STAGES[:1]}
FREED = "storage of size 0"
IN_A_STATE = "returned one of them in a State"

ROWS = {
    # https://github.com/pytorch/pytorch/pull/174829: backward enters by a tensor that is kept.
    "loss that a block keeps": Row(
        model=lambda: Blocks(odd.WithLoss), loss=odd.all_losses, **INFINITY
    ),
    # https://github.com/pytorch/pytorch/issues/181832: the hook on the output is lost.
    "output is a view and changed in place": of_blocks(
        model=lambda: odd.InPlaceAfter(odd.View), systems=("infinity",), slow=("zero 2",)
    ),
    # https://github.com/pytorch/pytorch/issues/77812: outputs in dataclasses are not seen.
    "dataclasses": Row(model=lambda: odd.StatesNet(odd.OfStates), loss=odd.loss_of_state, **SLOW),
    # https://github.com/facebookresearch/fairscale/pull/701: inputs in lists and dicts.
    "list that a unit changes": of_blocks(model=lambda: odd.AppendsNet(odd.Appends), **INFINITY),
    # https://github.com/mlfoundations/open_clip/pull/358: logit_scale; the process crashed.
    "returns a weight": Row(
        model=lambda: odd.Returns(lambda y, scale: (y, scale)),
        loss=odd.scaled_loss,
        systems=SHARDED,
        slow=FLAT,
    ),
    "returns a view of a weight": Row(
        model=lambda: odd.Returns(lambda y, scale: (y, scale[:2])),
        loss=odd.scaled_loss,
        systems=SHARDED,
        slow=FLAT,
    ),
    # https://github.com/pytorch/pytorch/issues/82461: a weight is read outside of the forward.
    "returns a weight in a dataclass": Row(
        model=lambda: odd.Returns(odd.State),
        loss=odd.scaled_loss,
        refused=dict.fromkeys(SHARDED, IN_A_STATE),
        systems=(),
        slow=SHARDED,
    ),
    # https://github.com/pytorch/pytorch/issues/26596: embeddings whose rows are special.
    "embedding with padding": of_blocks(model=lambda: odd.Embedded(padding_idx=0), **SLOW),
    # https://github.com/pytorch/pytorch/issues/37246: max_norm writes weights in the forward.
    "embedding that renormalizes its weight": of_blocks(
        model=lambda: odd.Embedded(max_norm=0.5),
        refused=dict.fromkeys(STAGES, r"embedding\.weight equal on all ranks")
        | {"infinity": "max_norm"},
    ),
    # https://github.com/deepspeedai/DeepSpeed/pull/1227: several forwards before a backward.
    "two forwards": of_blocks(loss=odd.two_forwards, **SLOW),
    "teacher": of_blocks(loss=odd.teacher, **SLOW),
    "adversarial": of_blocks(loss=odd.adversarial, **SLOW),
    # https://github.com/facebookresearch/fairscale/pull/784: a unit runs several times.
    "cells in a loop over time": of_blocks(model=odd.Recurrent, **SLOW),
    # https://github.com/pytorch/pytorch/issues/153354: units that run again in the backward.
    "checkpoint over units": of_blocks(model=lambda: odd.Checkpointed("units"), **SLOW),
    "nested checkpoint over units": of_blocks(model=lambda: odd.Checkpointed("nested"), **SLOW),
    "reentrant checkpoint over units": of_blocks(
        model=lambda: odd.Checkpointed("reentrant"), **SLOW
    ),
    # https://github.com/pytorch/pytorch/issues/117925: hooks of modules change gradients.
    "backward hooks of units": of_blocks(model=odd.with_hooks, **SLOW),
    # https://github.com/pytorch/pytorch/pull/70165: saved tensors, with weights, are copied.
    "saved on the host": of_blocks(loss=odd.saved_on_host, **SLOW),
    "anomaly detection": of_blocks(loss=odd.with_anomaly_detection, **SLOW),
    # https://github.com/pytorch/pytorch/issues/61470: weight_norm and other parametrizations.
    "weights that are computed": of_blocks(model=odd.normalized, **SLOW),
    # https://github.com/pytorch/pytorch/issues/98501: gradients that are views of others.
    "gradients that are not contiguous": Row(
        model=lambda: Blocks(odd.Expanded), loss=lambda model, x, _: 0.01 * model(x).sum(), **SLOW
    ),
    # https://github.com/deepspeedai/DeepSpeed/pull/8130: the input needs no gradient, two passes a
    # step. https://github.com/huggingface/transformers/issues/47254
    "frozen weights in recomputed blocks": Row(
        two_passes, lambda: odd.FrozenNorms(False), adamw, systems=("zero 3",)
    ),
    "frozen weights in reentrant blocks": Row(
        two_passes, lambda: odd.FrozenNorms(True), adamw, systems=("zero 3",)
    ),
    # https://github.com/deepspeedai/DeepSpeed/issues/8297,
    # https://github.com/deepspeedai/DeepSpeed/pull/8467: weights without elements or dimensions.
    # https://github.com/pytorch/pytorch/issues/130810: states after loading.
    "weights without elements": Row(
        save_before_the_first_step, odd.WithNothing, adamw, systems=FLAT
    ),
    "weights without elements, muon": Row(
        save_before_the_first_step, odd.WithNothing, muon, systems=FLAT
    ),
    # https://github.com/deepspeedai/DeepSpeed/issues/8414: float8 has its scales elsewhere.
    "stored weights": Row(train_stored, odd.WithStored, adamw_of_last, systems=STAGES),
    "stored weights under 16 bits": Row(
        train_stored,
        odd.WithStored,
        adamw_of_last,
        systems=STAGES,
        options={"param_dtype": torch.bfloat16},
        refused={"zero 3": "would cast floats"},
        atol=0.05,
    ),
    # https://github.com/pytorch/pytorch/issues/167856: fully_shard refuses containers.
    **{
        f"container, {kind}": Row(
            clipped,
            partial(odd.container, kind),
            momentum,
            partial(odd.by_parts, kind),
            systems=SHARDED,
        )
        for kind in odd.CONTAINERS
    },
    "a module of two units": Row(generates, odd.Sharing, systems=("zero 3",)),
    "layers that are called by name": Row(
        beside_another,
        odd.ByName,
        loss=lambda model, x, _: square(model.forward(x)),
        systems=("zero 3",),
    ),
    "weights in one tensor": Row(model=odd.in_one_tensor),
    # https://github.com/huggingface/accelerate/pull/3154: they would become two weights.
    **{
        f"two parameters in one memory, {is_part}": of_blocks(
            model=partial(odd.Copied, is_part),
            refused=dict.fromkeys(ZERO, r"encoder\.weight and decoder\.weight"),
        )
        for is_part in (False, True)
    },
    # https://github.com/huggingface/accelerate/pull/3154: it would stay as the weight was.
    **{
        f"buffer in a weight, {is_persistent}": Row(
            shown,
            partial(odd.with_buffer_in_a_weight, is_persistent),
            systems=(*ZERO, "Lomo", "parallelize"),
            refused=dict.fromkeys(
                ZERO, "buffer shown is in the memory of weight|buffer also is in"
            ),
        )
        for is_persistent in (False, True)
    },
    # https://github.com/pytorch/pytorch/issues/173709: backward reads freed weights: fully_shard
    # only looks at outputs.
    "loss within a unit": Row(
        model=odd.Kept,
        loss=odd.loss_of_kept,
        systems=("infinity",),
        slow=STAGES,
        refused={"zero 3": FREED},
    ),
}


@pytest.mark.parametrize(("name", "system", "world_size", "backend"), cases_of(ROWS))
@in_ranks()
def test_rows(rank: int, name: str, system: str, world_size: int, backend: str) -> None:
    check(rank, ROWS[name], system)
