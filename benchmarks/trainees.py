"""Makes a model and a group a way to train: one rank's model, its calls and its optimizer."""

# DDP looks at the annotations of its hooks: no annotations from the future in this file.

import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from decoder import by_dtensor, send_nothing, split_layers
from gradient_watch import gradients_of, live_bytes, states_of
from model import Llama
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.parallel import DistributedDataParallel

from ringcomm import ops
from ringcomm.optim import AdaLomo, InBackwardOptimizer, Lomo
from ringcomm.parallel import ParameterServer, offload, pipeline, zero
from ringcomm.parallel.model.cut import find_shards
from ringcomm.parallel.model.units import default_units

FAKE = "fake"  # torch's backend that moves nothing: a step without communication

# Learning rates of AdamW, of LOMO and SGD, and of AdaLomo.
ADAMW, LOMO, ADALOMO = 1e-3, 0.1, 0.01
CLIP_NORM = 0.5


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
        if isinstance(self.optimizer, InBackwardOptimizer):
            self.optimizer.backward(loss)  # twice, where it clips in two passes
        else:
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


# ---- optimizers


def adamw(params: Any) -> torch.optim.AdamW:
    """torch's, in one pass over memory."""
    return torch.optim.AdamW(params, ADAMW, fused=True)


def adamw_of(model: Llama) -> torch.optim.AdamW:
    """For all weights of a model."""
    return adamw(model.parameters())


def sgd_of(model: Llama) -> torch.optim.SGD:
    """torch's, which LOMO's losses are those of."""
    return torch.optim.SGD(model.parameters(), LOMO)


class _ClippedSGD(torch.optim.SGD):
    """Clips by the norm of all gradients first."""

    def step(self, closure: Any = None) -> Any:
        nn.utils.clip_grad_norm_(self.param_groups[0]["params"], CLIP_NORM)
        return super().step(closure)


def clipped_sgd_of(model: Llama) -> torch.optim.SGD:
    """torch's, clipped."""
    return _ClippedSGD(model.parameters(), LOMO)


def adalomo_of(model: Llama, group: Any = "none") -> AdaLomo:
    """ringcomm's, of one process if there is no group."""
    return AdaLomo(model, ADALOMO, group=group)


def muon_of(model: Llama) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of layers, and AdamW for the others."""
    matrices = [param for param in model.layers.parameters() if param.dim() == 2]
    known = set(matrices)
    muon = torch.optim.Muon(matrices, ADAMW, adjust_lr_fn="match_rms_adamw")
    return [muon, adamw([param for param in model.parameters() if param not in known])]


class Several:
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


def both_of(model: Llama) -> Several:
    """Muon's, as one optimizer."""
    return Several(muon_of(model))


# ---- ways to train: by torch


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


def ddp(
    model: Llama,
    group: dist.ProcessGroup,
    optimizer_of: Callable[[Llama], Any] = adamw_of,
    *,
    blocks: bool = False,
) -> Trainee:
    """A replica, with an optimizer of its own."""
    return Trainee(model, _replica(model, group, blocks=blocks), optimizer_of(model))


def torch_zero1(model: Llama, group: dist.ProcessGroup) -> Trainee:
    """torch's optimizer for shards of the states."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    how: Any = {"optimizer_class": torch.optim.AdamW, "lr": ADAMW, "fused": True}
    optimizer = ZeroRedundancyOptimizer(model.parameters(), process_group=group, **how)
    return Trainee(model, _replica(model, group), optimizer)


class ByDTensor(Trainee):
    """torch's tensor parallelism, with inputs of layers joined to one all_reduce, or not."""

    def __init__(self, model: Llama, group: dist.ProcessGroup, *, joins_inputs: bool) -> None:
        by_dtensor(model, group, joins_inputs=joins_inputs)
        kinds: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for param in model.parameters():
            kinds[isinstance(param, DTensor)].append(param)
        # One pass over memory takes tensors of one kind.
        super().__init__(model, model, Several([adamw(params) for params in kinds.values()]))

    def backward(self, ids: Tensor) -> float:
        """With the loss over shards of the classes."""
        with loss_parallel():
            loss: Any = self.call(ids[:, :-1], ids[:, 1:])
            loss.backward()
        return float(loss.full_tensor().detach())


# ---- ways to train: by ringcomm


def sharded(
    model: Llama,
    group: dist.ProcessGroup,
    stage: int,
    optimizer_of: Callable[[Llama], Any] = adamw_of,
) -> Trainee:
    """A stage of ZeRO."""
    optimizer = zero.shard(model, optimizer_of(model), stage, group=group)
    return Trainee(model, model, optimizer)


def offloaded(model: Llama, group: dist.ProcessGroup) -> Trainee:
    """All of it in files, in a folder that goes with the trainee."""
    folder = tempfile.TemporaryDirectory(prefix="bench-systems-")
    own = offload.Offloaded(
        torch.optim.AdamW(model.parameters(), ADAMW), to="nvme", path=folder.name
    )
    optimizer = zero.shard(model, own, 3, group=group, offload_weights=True)
    weakref.finalize(optimizer, folder.cleanup)
    return Trainee(model, model, optimizer)


class Served:
    """A parameter server as an optimizer; what a step starts is over at its end."""

    def __init__(self, model: Llama, group: dist.ProcessGroup) -> None:
        self.made: list[torch.optim.Optimizer] = []
        self.server = ParameterServer(model, self._make, group=group)

    def _make(self, groups: Any) -> torch.optim.Optimizer:
        self.made.append(adamw(groups))
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


def lomo(model: Llama, group: dist.ProcessGroup, **options: Any) -> Trainee:
    """Updates in the backward pass, with the options of Lomo."""
    return Trainee(model, model, Lomo(model, LOMO, group=group, **options))


def adalomo(model: Llama, group: dist.ProcessGroup) -> Trainee:
    """AdaLomo's, in the backward pass."""
    return Trainee(model, model, adalomo_of(model, group))


def lomo_on_shards(model: Llama, group: dist.ProcessGroup) -> Trainee:
    """The same of weights that fully_shard shards."""
    mesh = DeviceMesh.from_group(group, next(model.parameters()).device.type)
    for unit in [*default_units(model), model]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=True)
    return Trainee(model, model, Lomo(model, LOMO))


def in_parts(model: Llama, group: dist.ProcessGroup, *, shares_tokens: bool = False) -> Trainee:
    """Tensor parallelism; over the backend that moves nothing, of the classes this rank's alone."""
    if dist.get_backend(group) != FAKE:
        split_layers(model, group, shares_tokens=shares_tokens)
        return Trainee(model, model, adamw_of(model))
    num_classes = send_nothing(model)
    return Trainee(model, lambda ids, next_ids: model(ids, next_ids % num_classes), adamw_of(model))


class Piped(Trainee):
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
            self.pipe = pipeline.Pipeline(
                model.blocks(), ops.cross_entropy, "1f1b", num, group=self.group
            )
            self.model = self.pipe.module
            self.optimizer = adamw(self.pipe.parameters())
        return float(self.pipe.step(ids[:, :-1], ids[:, 1:]))
