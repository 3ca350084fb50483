"""The ranks of a job as a mesh: the axes of parallelism and their groups."""

import math
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ringcomm.torch_names import backend_of, flat_mesh, timeout_of

# From the outermost to the innermost axis: ranks that communicate most are neighbours.
_AXES = ("pp", "dp", "fsdp", "tp")
_TRAFFIC = {
    "pp": "activations and their gradients, once per micro-batch",
    "dp": "gradients, once per step",
    "fsdp": "weights and gradients of a layer, around its forward and backward",
    "tp": "activations, four times per layer",
    "ep": "tokens to their experts and back, four times per layer",
    "edp": "gradients of experts, once per step",
}


class ParallelDims:
    """Sizes of the axes of parallelism, checked against the number of ranks, and their meshes.

        dims = ParallelDims(dp=2, tp=2, pp=2)        # of 8 ranks
        print(dims)                                  # a table of the axes, their ranks and traffic
        train = parallelize(model, dims, make_optimizer)
        fully_shard(model, mesh=dims["fsdp"])        # or use the axes by hand

    `dp`, `fsdp`, `pp` and `tp` multiply to the number of ranks, and `ep` divides dp * fsdp. All
    groups have the time-out of the default group.

    Args:
        dp: replicas of the model. -1 means all ranks that remain for it.
        fsdp: ranks over which each replica's weights, gradients and optimizer state are sharded.
            With dp above 1 this is HSDP. -1 means all remaining ranks, if dp is given.
        pp: stages of the pipeline.
        tp: ranks over which each layer is sharded.
        ep: ranks over which the experts of each layer are sharded.
        world_size: the number of ranks; default: that of the default group. With it, sizes and the
            table need no group.
        device_type: of the meshes, "cpu" or "cuda". Default: that of the accelerator, if there is
            one.

    Raises:
        ValueError: the sizes do not multiply to the number of ranks; the message says what would.

    Attributes:
        dp, fsdp, pp, tp, ep: as resolved.
        world_size: the number of ranks.
    """

    def __init__(
        self,
        *,
        dp: int = -1,
        fsdp: int = 1,
        pp: int = 1,
        tp: int = 1,
        ep: int = 1,
        world_size: int | None = None,
        device_type: str | None = None,
    ) -> None:
        if world_size is None:
            if not dist.is_initialized():
                raise ValueError(
                    "ParallelDims needs the number of ranks: call"
                    " torch.distributed.init_process_group first, or pass world_size"
                )
            world_size = dist.get_world_size()
        sizes = _resolved({"pp": pp, "dp": dp, "fsdp": fsdp, "tp": tp}, world_size)
        self.world_size = world_size
        self.pp, self.dp, self.fsdp, self.tp = (sizes[axis] for axis in _AXES)
        if ep < 1 or self.dp * self.fsdp % ep:
            raise ValueError(
                f"ep {ep} must divide dp x fsdp, which has {self.dp * self.fsdp} ranks here: "
                "experts are sharded over data-parallel ranks"
            )
        self.ep = ep
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        self._device_type = device_type or (accelerator.type if accelerator else "cpu")

    # ---- meshes

    @cached_property
    def mesh(self) -> DeviceMesh:
        """All axes, ("pp", "dp", "fsdp", "tp"). Collective on first use."""
        self._check_world()
        shape = tuple(getattr(self, axis) for axis in _AXES)
        return _timed(init_device_mesh(self._device_type, shape, mesh_dim_names=_AXES))

    def __getitem__(self, axis: str) -> DeviceMesh:
        """The one-dimensional mesh of an axis that this rank is in.

        Args:
            axis: "pp", "dp", "fsdp", "tp", "ep"; "batch" for dp and fsdp together, the ranks with
                different rows of a batch; "edp" for the ranks of "batch" with the same experts; or
                "hsdp", a two-dimensional mesh of dp and fsdp for fully_shard.

        Raises:
            KeyError: there is no such axis.

        Collective on the first use of "batch", "hsdp", "ep" or "edp".
        """
        if axis in _AXES:
            return self.mesh[axis]
        self.ranks_of(axis)
        if axis in ("ep", "edp"):
            return self._experts[axis]
        return self._hsdp if axis == "hsdp" else self._batch

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of an axis; see __getitem__."""
        return self[axis].get_group()

    @cached_property
    def _batch(self) -> DeviceMesh:
        return _timed(flat_mesh(self.mesh["dp", "fsdp"], "batch"))

    @cached_property
    def _hsdp(self) -> DeviceMesh:
        mesh = self.mesh["dp", "fsdp"]
        _timed(flat_mesh(mesh))  # whose group zero.shard() takes
        return mesh

    @cached_property
    def _experts(self) -> dict[str, DeviceMesh]:
        self._check_world()
        found = {}
        for axis in ("edp", "ep"):
            lines = {tuple(self.ranks_of(axis, rank)) for rank in range(self.world_size)}
            group, _ = dist.new_subgroups_by_enumeration([[*line] for line in sorted(lines)])
            mesh = DeviceMesh.from_group(group, self._device_type, mesh_dim_names=(axis,))
            found[axis] = _timed(mesh)
        return found

    def _check_world(self) -> None:
        found = dist.get_world_size() if dist.is_initialized() else 0
        if found != self.world_size:
            raise ValueError(f"the mesh has {self.world_size} ranks, but the default group {found}")

    # ---- text output

    def __repr__(self) -> str:
        sizes = ", ".join(f"{axis}={getattr(self, axis)}" for axis in (*_AXES, "ep"))
        return f"ParallelDims({sizes})"

    def __str__(self) -> str:
        """A table of the axes with more than one rank: the first group of each and its traffic."""
        rows = [("axis", "size", "ranks", "what they exchange")]
        rows += [
            (axis, str(len(ranks)), " ".join(map(str, ranks)), _TRAFFIC[axis])
            for axis in (*_AXES, "ep", "edp")
            if len(ranks := self.ranks_of(axis)) > 1 and (axis != "edp" or self.ep > 1)
        ]
        width = max(len(ranks) for _, _, ranks, _ in rows)
        lines = [f"{axis:4}  {size:4}  {ranks:{width}}  {what}" for axis, size, ranks, what in rows]
        factors = " x ".join(f"{axis} {getattr(self, axis)}" for axis in _AXES)
        return "\n".join([f"{self.world_size} ranks = {factors}, ep {self.ep}", *lines])

    def ranks_of(self, axis: str, rank: int = 0) -> list[int]:
        """The global ranks of the group of `rank` along an axis. Needs and makes no process group.

        Raises:
            KeyError: there is no such axis.
        """
        ranks = torch.arange(self.world_size, device="cpu")
        if axis in ("ep", "edp"):
            box, dim = ranks.view(self.pp, -1, self.ep, self.tp), 2 if axis == "ep" else 1
        elif axis in ("batch", "hsdp"):
            box, dim = ranks.view(self.pp, -1, self.tp), 1
        elif axis in _AXES:
            box, dim = ranks.view(self.pp, self.dp, self.fsdp, self.tp), _AXES.index(axis)
        else:
            raise KeyError(
                f"the axis must be one of {', '.join(_AXES)}, ep, edp, batch, hsdp; got {axis!r}"
            )
        lines = box.movedim(dim, -1).reshape(-1, box.shape[dim])
        return lines[(lines == rank).any(dim=1)][0].tolist()


def _timed(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh; its groups get the time-out of the default group, torch gives them its own."""
    world: Any = dist.group.WORLD
    timeout = timeout_of(backend_of(world, torch.device(mesh.device_type)))
    for group in mesh.get_all_groups():
        group.set_timeout(timeout)
    return mesh


def _resolved(sizes: dict[str, int], world_size: int) -> dict[str, int]:
    for axis, size in sizes.items():
        may_be_rest = axis in ("dp", "fsdp")
        if size < 1 and not (size == -1 and may_be_rest):
            rest = " or -1 for all remaining ranks" if may_be_rest else ""
            raise ValueError(f"{axis} must be a positive number{rest}, got {size}")
    left = [axis for axis, size in sizes.items() if size == -1]
    if len(left) > 1:
        raise ValueError("dp and fsdp cannot both be -1: set one of them to a number")
    known = math.prod(size for size in sizes.values() if size != -1)
    if world_size % known or (not left and known != world_size):
        words = " x ".join(f"{axis} {size}" for axis, size in sizes.items() if size != -1)
        wanted = f"a multiple of {known}" if left else f"{known}"
        raise ValueError(f"{words} needs {wanted} ranks, got {world_size}")
    return sizes | dict.fromkeys(left, world_size // known)
