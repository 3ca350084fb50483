"""The systems that `ringcomm bench systems` compares, made from a model and a group."""

# DDP looks at the annotations of its hooks: no annotations from the future in this file.

import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from decoder import (
    HEAD_WIDTH,
    config_of,
    make_pipeline,
    pipeline_bytes,
    split_bytes,
    split_layers,
)
from gradient_watch import gradients_of, live_bytes, states_of
from model import Llama
from operations import RINGCOMM
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from ringcomm.optim import Lomo
from ringcomm.parallel import ParameterServer, offload, zero
from ringcomm.parallel.model.cut import find_shards
from ringcomm.parallel.model.units import default_units

GLOO = "gloo"
FAKE = "fake"  # torch's backend that moves nothing: a step without communication

# Learning rates of AdamW and LOMO.
ADAMW, LOMO = 1e-3, 0.1
# What a rank sends in a step, of a workload and its number of weights.
Formula = Callable[["Workload", int], float]


@dataclass
class Trainee:
    """One rank's model and the system that trains it."""

    model: nn.Module
    call: Callable[[Tensor, Tensor], Tensor]
    optimizer: Any

    def step(self, ids: Tensor) -> float:
        """Trains a step; the loss of these rows before it."""
        loss = self.backward(ids)
        self.update()
        return loss

    def backward(self, ids: Tensor) -> float:
        """The first half of a step; the loss."""
        loss = self.call(ids[:, :-1], ids[:, 1:])
        loss.backward()
        return float(loss.detach())

    def update(self) -> None:
        """The other half."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def grad_bytes(self) -> int:
        """What this rank keeps of gradients, between the halves."""
        grads = [param.grad for param in self.model.parameters()]
        if isinstance(self.optimizer, zero.ZeroOptimizer):
            grads += gradients_of(self.optimizer)
        return live_bytes(grads)

    def param_bytes(self) -> int:
        """What this rank keeps of the weights between steps."""
        found = []
        for param in self.model.parameters():
            shards = find_shards(param)
            found.append(param if shards is None else shards.unit_of(param).shards[param])
        return live_bytes(found)

    def state_bytes(self) -> int:
        """What this rank keeps of the optimizer's state."""
        if isinstance(self.optimizer, zero.ZeroOptimizer):
            return live_bytes(states_of(self.optimizer))
        inner = getattr(self.optimizer, "optim", self.optimizer)
        states = inner.state.values()
        return live_bytes(v for state in states for v in state.values() if isinstance(v, Tensor))


@dataclass(frozen=True)
class System:
    """A way to train on several ranks.

    Attributes:
        make: from a model and its group.
        formula_bytes: what a rank sends in a step, of a Workload and its number of weights.
        like: whose losses it has to have.
        others: supported backends besides ringcomm.
        is_counted: whether what a rank sends belongs to one step; a server answers when asked.
        sees_all: whether each rank is given the rows of all.
    """

    make: Callable[[Llama, dist.ProcessGroup], Trainee]
    formula_bytes: Formula
    like: Callable[[Llama], Any] = lambda model: _adamw(model.parameters())
    others: tuple[str, ...] = ()
    is_counted: bool = True
    sees_all: bool = False


def _parts(num: int) -> Formula:
    """So many (N-1)/N of the weights' bytes."""
    return lambda systems, num_params: num * (1 - 1 / systems.world_size) * 4 * num_params


def _lomo_bytes(num: int) -> Formula:
    """And once 8 bytes a tensor, by which ranks agree on the gradients that there are."""

    def formula(systems: "Workload", num_params: int) -> float:
        num_tensors = 9 * systems.num_layers + 3
        agreement = 2 * (1 - 1 / systems.world_size) * 8 * num_tensors
        return _parts(num)(systems, num_params) + agreement

    return formula


def _offloaded_bytes(systems: "Workload", num_params: int) -> float:
    """Three parts; and 8 bytes a tensor to each other rank in the backward pass and in step()."""
    told = 2 * 8 * (systems.world_size - 1) * (9 * systems.num_layers + 3)
    return _parts(3)(systems, num_params) + told


def _adamw(params: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, ADAMW, fused=True)


def _like_muon(model: Llama) -> Any:
    return _Several(_muon_and_adamw(model))


def _sgd(model: Llama) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), LOMO)


def _average_now(
    group: dist.ProcessGroup, bucket: dist.GradBucket
) -> torch.futures.Future[torch.Tensor]:
    """A hook of DDP that returns when the bucket's mean is there.

    The fake backend, which moves nothing, needs it too: its own futures have no result.
    """
    if dist.get_backend(group) != FAKE:
        dist.all_reduce(bucket.buffer(), dist.ReduceOp.AVG, group)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


def _replica(
    model: Llama, group: dist.ProcessGroup, *, blocks: bool = False
) -> DistributedDataParallel:
    replica = DistributedDataParallel(model, process_group=group, gradient_as_bucket_view=True)
    if blocks or dist.get_backend(group) == FAKE:
        replica.register_comm_hook(group, _average_now)
    return replica


def _ddp(model: Llama, group: dist.ProcessGroup, *, blocks: bool = False) -> Trainee:
    return Trainee(model, _replica(model, group, blocks=blocks), _adamw(model.parameters()))


def _torch_zero1(model: Llama, group: dist.ProcessGroup) -> Trainee:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    how: Any = {"optimizer_class": torch.optim.AdamW, "lr": ADAMW, "fused": True}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), process_group=group, **how)
    return Trainee(model, _replica(model, group), optimizer)


def _zero(stage: int, model: Llama, group: dist.ProcessGroup) -> Trainee:
    optimizer = zero.shard(model, _adamw(model.parameters()), stage, group=group)
    return Trainee(model, model, optimizer)


class _Several:
    """Optimizers that step together, in every process the same."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        """All of them."""
        for each in self.optimizers:
            each.step()

    def zero_grad(self) -> None:
        """All of them."""
        for each in self.optimizers:
            each.zero_grad()

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """Of all of them."""
        return {key: state for each in self.optimizers for key, state in each.state.items()}


def _muon_and_adamw(model: Llama) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of layers."""
    matrices = [param for param in model.layers.parameters() if param.dim() == 2]
    known = set(matrices)
    muon = torch.optim.Muon(matrices, ADAMW, adjust_lr_fn="match_rms_adamw")
    return [muon, _adamw([param for param in model.parameters() if param not in known])]


def _muon(stage: int, model: Llama, group: dist.ProcessGroup) -> Trainee:
    if stage == 0:
        return Trainee(model, _replica(model, group), _Several(_muon_and_adamw(model)))
    return Trainee(model, model, zero.shard(model, _muon_and_adamw(model), stage, group=group))


def _muon_bytes(systems: "Workload", num_params: int) -> float:
    """Stage 3's; and each matrix, its gradient and its new values between its owner and others."""
    num = systems.world_size
    matrices = (4 + 3 * 11 / 4) * systems.width**2 * systems.num_layers
    return _parts(3)(systems, num_params) + 3 * (num - 1) / num**2 * 4 * matrices


def _offloaded(model: Llama, group: dist.ProcessGroup) -> Trainee:
    """All of it in files, in a folder that goes with the trainee."""
    folder = tempfile.TemporaryDirectory(prefix="bench-systems-")
    adamw = offload.Offloaded(
        torch.optim.AdamW(model.parameters(), ADAMW), to="nvme", path=folder.name
    )
    optimizer = zero.shard(model, adamw, 3, group=group, offload_weights=True)
    weakref.finalize(optimizer, folder.cleanup)
    return Trainee(model, model, optimizer)


class _Served:
    """A parameter server as an optimizer; what a step starts is over at its end."""

    def __init__(self, model: Llama, group: dist.ProcessGroup) -> None:
        self.made: list[torch.optim.Optimizer] = []
        self.server = ParameterServer(model, self._make, group=group)

    def _make(self, groups: Any) -> torch.optim.Optimizer:
        self.made.append(_adamw(groups))
        return self.made[-1]

    def step(self) -> None:
        """Waits for the update, which would otherwise overlap the next measurement."""
        self.server.push()
        self.server.pull(fresh=True)

    def zero_grad(self) -> None:
        """push() has dropped them."""

    @property
    def state(self) -> dict[Any, dict[str, Any]]:
        """Of the keys that this rank serves: its copies of them, and the optimizer's state."""
        return {
            param: {"copy": param, **made.state[param]}
            for made in self.made
            for group in made.param_groups
            for param in group["params"]
        }


def _lomo_on_shards(model: Llama, group: dist.ProcessGroup) -> Trainee:
    mesh = DeviceMesh.from_group(group, next(model.parameters()).device.type)
    for unit in [*default_units(model), model]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    return Trainee(model, model, Lomo(model, LOMO))


def _tensor(*, shares_tokens: bool) -> System:
    def make(model: Llama, group: dist.ProcessGroup) -> Trainee:
        split_layers(model, group, shares_tokens=shares_tokens)
        return Trainee(model, model, _adamw(model.parameters()))

    def sent_bytes(systems: "Workload", _: int) -> float:
        sizes = systems.width, systems.num_layers, systems.num_tokens
        reduced = split_bytes(*sizes, shares_tokens=shares_tokens)
        return 2 * (1 - 1 / systems.world_size) * reduced

    return System(make, sent_bytes, others=(GLOO,), sees_all=True)


class _Pipeline(Trainee):
    """A stage, whose backward pass is the pipeline's."""

    def __init__(self, model: Llama, group: dist.ProcessGroup) -> None:
        self.group = group
        self.pipe: Any = None
        super().__init__(model, model, None)

    def backward(self, ids: Tensor) -> float:
        """Of all micro-batches."""
        if self.pipe is None:
            most = 2 * self.group.size()
            num = max(n for n in range(1, most + 1) if ids.shape[0] % n == 0)
            model: Any = self.model
            self.pipe = make_pipeline(model, self.group, num)
            self.model = self.pipe.module
            self.optimizer = _adamw(self.pipe.parameters())
        return float(self.pipe.step(ids[:, :-1], ids[:, 1:]))


# Parts of a model check what the others send, so that nothing moves no result for them.
_PORTABLE = (GLOO, FAKE)
SYSTEMS: dict[str, System] = {
    "ddp": System(_ddp, _parts(2), others=_PORTABLE),
    "ddp blocking": System(partial(_ddp, blocks=True), _parts(2), others=_PORTABLE),
    "torch's zero-1": System(_torch_zero1, _parts(3), others=_PORTABLE),
    "zero-1": System(partial(_zero, 1), _parts(2), others=_PORTABLE),
    "zero-2": System(partial(_zero, 2), _parts(2), others=_PORTABLE),
    "zero-3": System(partial(_zero, 3), _parts(3), others=_PORTABLE),
    "muon ddp": System(partial(_muon, 0), _parts(2), like=_like_muon, others=_PORTABLE),
    "muon zero-1": System(partial(_muon, 1), _parts(2), like=_like_muon, others=_PORTABLE),
    "muon zero-2": System(partial(_muon, 2), _parts(2), like=_like_muon, others=_PORTABLE),
    "muon zero-3": System(partial(_muon, 3), _muon_bytes, like=_like_muon, others=_PORTABLE),
    "zero-3 in files": System(_offloaded, _offloaded_bytes),
    "parameter server": System(
        lambda m, group: Trainee(m, m, _Served(m, group)), _parts(2), is_counted=False
    ),
    "lomo": System(
        lambda m, group: Trainee(m, m, Lomo(m, LOMO, group=group)),
        _lomo_bytes(2),
        like=_sgd,
        others=_PORTABLE,
    ),
    "lomo on shards": System(_lomo_on_shards, _lomo_bytes(3), like=_sgd, others=_PORTABLE),
    "tensor": _tensor(shares_tokens=False),
    "tensor, tokens shared": _tensor(shares_tokens=True),
    "pipeline": System(
        _Pipeline,
        lambda systems, _: pipeline_bytes(systems.width, systems.num_tokens, systems.world_size),
        others=(GLOO,),
        sees_all=True,
    ),
}
# What is measured unless something else is asked for: all over ringcomm, and torch's over Gloo.
# Not Muon: without AVX-512 a product of bfloat16 matrices takes 30 to 70 times as long as one of
# float32, and a step takes seconds.
DEFAULT = [name for name in SYSTEMS if name != "ddp blocking" and not name.startswith("muon")]
DEFAULT.insert(2, f"torch's zero-1 on {GLOO}")


def parse_name(name: str) -> tuple[str, str]:
    """``"ddp on gloo"`` as system and backend; without one over ringcomm. Raises ValueError."""
    if name in SYSTEMS:
        return name, RINGCOMM
    system, _, backend = name.rpartition(" on ")
    if system not in SYSTEMS:
        raise ValueError(f"--systems must be some of {'; '.join(SYSTEMS)}, got {name!r}")
    if backend not in SYSTEMS[system].others:
        others = " and ".join(SYSTEMS[system].others) or "ringcomm alone"
        raise ValueError(f"--systems: {system} runs with {others} only, got {backend!r}")
    return system, backend


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The Llama that all systems train, and each rank's batch of rows × tokens.

    Attributes:
        names: systems, over ringcomm or "SYSTEM on BACKEND"; others are compared with the first.
    """

    names: list[str]
    world_size: int
    width: int
    num_layers: int
    rows: int
    tokens: int

    def check(self) -> None:
        """Raises ValueError naming an invalid option."""
        if not self.names:
            raise ValueError(f"--systems must be some of {'; '.join(SYSTEMS)}, got none")
        systems = [parse_name(name)[0] for name in self.names]
        if min(self.world_size, self.num_layers, self.rows, self.tokens) < 1:
            raise ValueError("needs at least one rank, one layer, one row and one token")
        if self.width < HEAD_WIDTH or self.width % HEAD_WIDTH:
            raise ValueError(f"--width must be a multiple of {HEAD_WIDTH}, got {self.width}")
        num, in_parts = self.world_size, [n for n in systems if n.startswith("tensor")]
        if in_parts and (self.width // HEAD_WIDTH < num or self.tokens % num):
            raise ValueError(
                f"{' and '.join(in_parts)} need a head of {HEAD_WIDTH} features for each of {num}"
                f" ranks, and a number of tokens that is a multiple of {num}: change --width,"
                " --tokens or --systems"
            )
        if "pipeline" in systems and self.num_layers + 3 < num:
            raise ValueError(
                f"{self.num_layers} layers are too few for {num} pipeline stages, one for each rank"
            )

    @property
    def num_tokens(self) -> int:
        """Of all ranks, in a step."""
        return self.world_size * self.rows * self.tokens

    def model(self) -> Llama:
        """The same on every rank."""
        return Llama(config_of(self.width, self.num_layers))

    def ids(self, step: int) -> Tensor:
        """All ranks' rows of a step."""
        generator = torch.Generator().manual_seed(step)
        return torch.randint(
            256, [self.world_size * self.rows, self.tokens + 1], generator=generator
        )

    def ids_for(self, system: System, step: int, rank: int) -> Tensor:
        """The ids of a rank."""
        ids = self.ids(step)
        return ids if system.sees_all else ids[rank * self.rows : (rank + 1) * self.rows]

    def backward_alone(self) -> Callable[[], None]:
        """A call that makes forward and backward passes of a rank's rows, and nothing else."""
        model, ids = self.model(), self.ids(0)[: self.rows]

        def call() -> None:
            model(ids[:, :-1], ids[:, 1:]).backward()
            model.zero_grad()

        return call
