"""Programs of users: each runs in one process, and on ranks with a system of the library.

A Row has a model, an optimizer of torch, a loss, and a program, which says what the user does with
a Training: steps and what comes between them. In one process a Training has the rows of all ranks.
Ranks must come to the same weights, and to the same of what the program returns.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_states import full_weights, load_parts, save_parts
from ranks import place
from steps import apply_steps
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.checkpoint.state_dict import set_state_dict as set_by_torch
from torch.distributed.fsdp import fully_shard
from whole_optimizers import Muon64, by_dimensions
from zero_models import Net, assert_alike, assert_close, batch, loss_of

from ringcomm.optim import AdaLomo, Lomo
from ringcomm.parallel import (
    ParallelDims,
    clip_grad_norm_,
    expert,
    get_state_dict,
    offload,
    parallelize,
    set_state_dict,
    zero,
)
from ringcomm.parallel.optimizer_classes import optimizers_of

ALONE = "one process"
EACH = "each rank"  # one process on each rank, with the rows of all
APART = "rank by rank"  # each on its rows: what is not one training must be found
AVERAGED = ("average", "DDP", "fully_shard")  # with gradients of experts by hand
STAGES = ("zero 1", "zero 2", "zero 3")
SHARDED = ("zero 3", "infinity")
ZERO = (*STAGES, "infinity")
BITS: dict[str, Any] = {"rtol": 0, "atol": 0}


def adamw(model: nn.Module) -> Any:
    return torch.optim.AdamW(model.parameters(), 0.02, eps=1e-3)


def sgd(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.SGD(trained, **{"lr": 0.1, **options})


momentum = partial(sgd, momentum=0.9)


def muon(model: nn.Module, kind: Any = Muon64) -> Any:
    """An optimizer of the matrices, and AdamW."""
    rest = partial(torch.optim.AdamW, lr=0.02, eps=1e-3)
    return by_dimensions([{"params": [*model.parameters()]}], kind, rest)


def trained_by(system: str, model: nn.Module, given: Any, **options: Any) -> Any:
    """The optimizer of a system that makes the steps of a given one."""
    if system in (ALONE, EACH, APART, *AVERAGED):
        return given
    if kind := {"Lomo": Lomo, "AdaLomo": AdaLomo}.get(system):
        over = {} if options.keys() & {"group", "mesh"} else {"group": dist.group.WORLD}
        rates = given.defaults["lr"], given.defaults["weight_decay"]
        return kind(model, *rates, **over, **options)
    name, _, where = system.partition(", ")
    if where or name in ("offload", "infinity"):
        words = {name: options.pop(name) for name in ("elementwise", "whole") if name in options}
        given = offloaded(given, **words, **PLACES[where])
    if name == "offload":
        return given
    if name == "infinity":
        return zero.shard(model, given, 3, offload_weights=True, **options)
    return zero.shard(model, given, int(name[-1]), **options)


# Where states are: files have no names, and are gone with their optimizer.
PLACES: dict[str, dict[str, Any]] = {
    "": {},
    "host": {},
    "file": {"to": "nvme", "path": tempfile.gettempdir()},
}


def offloaded(given: Any, **options: Any) -> Any:
    """Those of them that are not yet offloaded."""
    if isinstance(given, list):
        return [offloaded(each, **options) for each in given]
    is_own = isinstance(given, offload.Offloaded)
    return given if is_own else offload.Offloaded(given, **options)


def parallelized(made: Training) -> Any:
    """What has the steps of a model on a mesh, by default of ranks that have all layers."""
    dims = made.dims or ParallelDims(dp=dist.get_world_size())
    stage = int(made.system[-1]) if "zero" in made.system else 0
    mse = nn.functional.mse_loss
    return parallelize(made.model, dims, lambda _: made.given, loss_fn=mse, zero_stage=stage)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Any) -> Any:
        return x + self.b(torch.tanh(self.a(x)))


class Blocks(nn.Module):
    """A model of blocks, which become units of stage 3."""

    def __init__(self, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(7, 8)
        self.blocks = nn.ModuleList(block() for _ in range(2))
        self.last = nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def square(output: Tensor) -> Tensor:
    return output.square().mean()


def squared(model: Any, x: Tensor, _: Tensor) -> Tensor:
    return square(model(x))


class Training:
    """A model in training, on the rows of some ranks.

    Attributes:
        ranks: whose rows it has; in one process those of all.
        early: what the row has made of the given optimizer before the system got it.
        owner, dims: of parallelize(), or None.
        norms: of the gradients of each step, if the option clip_grad_norm is given.
        wrapped: the model as it is called.
    """

    def __init__(self, row: Row, system: str, rank: int = 0, device: str = "cpu") -> None:
        self.row, self.system, self.rank = row, system, rank
        self.device = place(device, rank)
        self.owner: Any = None
        self.dims = ParallelDims(**row.dims) if "parallelize" in system and row.dims else None
        self.norms: list[float] = []
        is_one = system in (ALONE, EACH, APART) or row.on_ranks is None
        model = row.model() if is_one else row.on_ranks(self)  # type: ignore[misc]
        self.model: Any = model if device == "cpu" else model.to(self.device)
        if system == "fully_shard":
            fully_shard(self.model, ignored_params={*expert.expert_parameters(self.model).values()})
        self.wrapped = self.model
        self.options = row.options(self) if callable(row.options) else row.options
        self.given: Any = row.optimizer(self.model)
        self.early = row.early(self.given)
        self.optimizer, self.ranks = self.given, range(row.num_ranks)
        self.train(range(100, 100 + row.steps_before))

    def begin(self) -> Training:
        """Under the system, on this rank's rows."""
        if not self.system.startswith((ALONE, EACH, "offload")):
            self.ranks = range(self.rank, self.rank + 1)
        if self.system == "DDP":
            expert.ignore_in_ddp(self.model)
            self.wrapped = nn.parallel.DistributedDataParallel(self.model)
        if self.system.startswith("parallelize"):
            self.owner = parallelized(self)
            self.optimizer = self.owner.optimizer
        else:
            self.optimizer = trained_by(self.system, self.model, self.given, **self.options)
        for param in self.model.parameters():
            mesh = getattr(param, "device_mesh", None)
            kinds = param.device.type, mesh.device_type if mesh else self.device.type
            assert kinds == (self.device.type, self.device.type)
        return self

    @property
    def is_alone(self) -> bool:
        return self.system == ALONE

    @property
    def optimizers(self) -> list[Any]:
        return [*optimizers_of(self.optimizer)]

    def rows(self, step: int, rank: int) -> tuple[Tensor, Tensor]:
        x, y = self.row.batch(step, rank, self.row.num_ranks)
        return x.to(self.device), y.to(self.device)

    def backward(self, step: int, factor: float = 1.0) -> float:
        """Of the mean over the ranks, times a factor; returns it."""
        total = 0.0
        for rank in self.ranks:
            if self.owner is not None:
                total += float(self.owner.step(*self.rows(step, rank)))
                continue
            loss = self.row.loss(self.wrapped, *self.rows(step, rank)) * factor / len(self.ranks)
            self.backward_of(loss)
            total += loss.item()
        return total

    def backward_of(self, loss: Tensor) -> None:
        """A pass as the system wants it."""
        if self.options.get("clip_mode") == "two_pass" and not self.is_alone:
            self.optimizer.backward(loss)
        else:
            getattr(self.optimizer, "scale", lambda loss: loss)(loss).backward()

    def clip(self, max_norm: float) -> Tensor:
        if self.system in (ALONE, EACH):
            return nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        if self.system in AVERAGED:
            return clip_grad_norm_(self.model, max_norm)
        norm: Tensor = self.optimizer.clip_grad_norm_(max_norm)
        return norm

    def step(self) -> None:
        """With the options for clipping; in one process by torch."""
        if self.system in AVERAGED:
            expert.average_gradients(self.wrapped)
        is_one = self.system in (ALONE, EACH, *AVERAGED)
        max_norm = self.options.get("clip_grad_norm")
        if is_one and max_norm is not None:
            self.norms.append(float(self.clip(max_norm)))
        if is_one and (max_value := self.options.get("clip_grad_value")) is not None:
            nn.utils.clip_grad_value_(self.model.parameters(), max_value)
        apply_steps(*self.optimizers)
        if not is_one and max_norm is not None:
            self.norms.append(self.optimizer.grad_norm)

    def train(self, steps: Iterable[int]) -> None:
        for step in steps:
            for part in range(self.row.num_parts):
                self.backward(self.row.num_parts * step + part)
            self.step()

    def weights(self) -> dict[str, Tensor]:
        """Whole ones, as float32."""
        found = full_weights(self.model).items()
        return {name: value.float().cpu() for name, value in found if value.is_floating_point()}

    def save(self) -> Any:
        return copy.deepcopy(get_state_dict(self.model, self.optimizer, full=True))

    def load_own_state(self) -> None:
        """The optimizer's, by its own calls."""
        for each in self.optimizers:
            each.load_state_dict(each.state_dict())

    def reload(
        self,
        system: str = "",
        prepare: Callable[[Training], Any] | None = None,
        *,
        in_parts: bool = False,
        device: str = "",
        **changes: Any,
    ) -> None:
        """A new model and optimizer from the checkpoint of the old ones; in one process nothing.

        Args:
            in_parts: all ranks write the checkpoint.
            device: another one for the new model.
            changes: of the row.
        """
        if self.is_alone:
            return
        values, state = self.save()
        options = {} if callable(self.row.options) else self.row.options
        row = dataclasses.replace(self.row, **{"steps_before": 0, "options": options, **changes})
        new = Training(row, system or self.system, self.rank, device or self.device.type).begin()
        new.norms = self.norms
        if prepare is not None:
            prepare(new)
        if in_parts:
            by_torch = "infinity" not in self.system
            with shared_folder() as folder:
                save_parts(self.model, self.optimizer, folder, by_torch=by_torch)
                load_parts(new.model, new.optimizer, folder, by_torch=by_torch)
        elif new.system == EACH != self.system:
            for group in state["param_groups"]:  # torch loads no keys that it does not know
                group.pop("loss_scale", None)
                group.pop("loss_scale_good_steps", None)
            whole = StateDictOptions(full_state_dict=True, strict=False)
            set_by_torch(
                new.model,
                new.optimizers,
                model_state_dict=values,
                optim_state_dict=state,
                options=whole,
            )
        else:
            set_state_dict(new.model, new.optimizer, values, state)
        self.__dict__ = new.__dict__

    def next_stage(self) -> str:
        """Another one, where a checkpoint goes on."""
        return STAGES[(STAGES.index(self.system) + 1) % 3] if self.system in STAGES else self.system


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """A new one of all ranks, which is removed at the end. Collective."""
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder)
    try:
        yield Path(str(folder[0]))
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(str(folder[0]))


def train(made: Training) -> None:
    made.train(range(3))


def resume(made: Training) -> None:
    """Under another stage."""
    made.train(range(2))
    made.reload(made.next_stage())
    made.train(range(2, 4))


def moves(made: Training) -> None:
    """The state goes from the device to the CPU, and back."""
    for step, device in enumerate((made.device.type, "cpu", made.device.type)):
        if step:
            made.reload(device=device)
        made.train([step])


def resume_at_once(made: Training) -> None:
    """From the state before the first step."""
    made.reload()
    made.train(range(3))


def overflows(where: str, made: Training) -> None:
    """On rank 1, in its loss or a gradient; nothing changes on any rank, and training goes on."""
    made.train([0])
    if not made.is_alone:
        before, scale = copy.deepcopy(made.save()), made.optimizer.loss_scale
        if is_in_grad := bool(where) and made.rank == 1:
            hook = made.model.get_parameter(where).register_hook(lambda grad: grad * torch.inf)
        made.backward(7, torch.inf if made.rank == 1 and not where else 1.0)
        if is_in_grad:
            hook.remove()
        made.optimizer.step()  # which drops the gradients
        assert made.system not in ZERO or not math.isfinite(made.optimizer.grad_norm)
        assert made.optimizer.loss_scale == scale / 2
        for found, wanted in zip(made.save(), before, strict=True):
            torch.testing.assert_close(
                found.get("state", found), wanted.get("state", wanted), **BITS
            )
    made.train(range(1, 3))


def is_nan(made: Training) -> None:
    """The loss of rank 1; an error on all ranks that writes nothing."""
    made.train([0])
    if not made.is_alone:
        before = made.weights()

        def step() -> None:
            made.backward(7, torch.nan if made.rank == 1 else 1.0)
            made.optimizer.step()

        with pytest.raises(RuntimeError, match=r"nan; no weight has been|not finite"):
            step()
        made.optimizer.zero_grad()
        torch.testing.assert_close(made.weights(), before, **BITS)
    made.train(range(1, 3))


@dataclasses.dataclass(frozen=True)
class Row:
    """A program of a user.

    Attributes:
        program: what the user does; what it returns must be that of one process.
        model, optimizer: make them; the optimizer of the model.
        on_ranks: makes the model of a system, where that has groups of ranks.
        dims: the sizes of parallelize()'s mesh.
        loss: of the model and the rows of a rank.
        batch: those of a step, a rank and a number of ranks.
        systems, slow: which train it, and which besides in slow tests.
        refused: by system the words of the error that its program ends in.
        options: of the system, or what makes them on all ranks.
        early: called with the given optimizer before the system gets it.
        steps_before: of one process on all rows, before the system gets the model.
        num_parts: micro-batches of a step.
    """

    program: Callable[[Training], Any] = train
    model: Callable[[], Any] = Net
    optimizer: Callable[[Any], Any] = sgd
    loss: Callable[..., Tensor] = loss_of
    systems: tuple[str, ...] = ZERO
    slow: tuple[str, ...] = ()
    refused: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options: Any = dataclasses.field(default_factory=dict)
    early: Callable[[Any], Any] = lambda _: None
    steps_before: int = 0
    num_parts: int = 1
    num_ranks: int = 2
    backend: str = "ringcomm"
    atol: float = 1e-5
    batch: Callable[[int, int, int], tuple[Tensor, Tensor]] = batch
    on_ranks: Callable[[Training], Any] | None = None
    dims: Mapping[str, Any] | None = None


def cases_of(rows: Mapping[str, Row]) -> list[Any]:
    """The parameters name, system, world_size and backend of a test that calls check()."""
    return [
        pytest.param(name, system, row.num_ranks, row.backend, marks=marks, id=f"{name}, {system}")
        for name, row in rows.items()
        for systems, marks in ((row.systems, ()), (row.slow, pytest.mark.slow))
        for system in systems
    ]


def check(rank: int, row: Row, system: str, device: str = "cpu") -> None:
    """That a rank under a system comes to what one process comes to, or is told why not."""
    if words := row.refused.get(system):
        _check_refused(Training(row, system, rank, device), words)
        return
    alone = Training(row, ALONE).begin()
    expected = row.program(alone)
    made = Training(row, system, rank, device).begin()
    found = row.program(made)
    if isinstance(expected, Tensor):
        torch.testing.assert_close(found, expected, rtol=0, atol=row.atol)
    else:
        assert found == expected, f"{found} instead of {expected}"
    assert made.norms == pytest.approx(alone.norms, rel=max(1e-4, row.atol))
    weights, wanted = made.weights(), alone.weights()
    names = [name for name, _ in alone.model.named_parameters() if name in wanted]
    assert_close(weights, {name: wanted[name] for name in names}, row.atol)
    if dist.is_initialized():
        assert_alike(weights)


def _check_refused(made: Training, words: str) -> None:
    """By an error; a system that refuses a model or an optimizer changes nothing."""
    before, seed = copy.deepcopy(made.model.state_dict()), torch.get_rng_state()

    def run() -> None:
        made.begin()
        made.row.program(made)

    with pytest.raises((ArithmeticError, RuntimeError, TypeError, ValueError), match=words):
        run()
    if made.optimizer is not made.given:
        return
    assert torch.equal(torch.get_rng_state(), seed)
    for name, value in made.model.state_dict().items():
        assert value.is_meta or torch.equal(value, before[name]), name
    for each in made.optimizers if made.system != "infinity" else ():
        each.zero_grad()  # was not given away
