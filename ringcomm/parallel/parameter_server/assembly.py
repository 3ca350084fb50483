"""Makes the parts of a parameter server on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from typing_extensions import Self

from ringcomm.backend import resolve_group
from ringcomm.loss_scale import LossScale
from ringcomm.parallel.flat_collectives import check_agreement
from ringcomm.parallel.parameter_server.keys import Key, Packing, assign, keys_of
from ringcomm.parallel.parameter_server.messages import Channel
from ringcomm.parallel.parameter_server.optimizer import ServerOptimizer
from ringcomm.parallel.parameter_server.options import Options
from ringcomm.parallel.parameter_server.param_groups import (
    MakeOptimizer,
    groups_of_keys,
    optimizer_of,
)
from ringcomm.parallel.parameter_server.ports import LocalPort, Port, RemotePort
from ringcomm.parallel.parameter_server.replicas import Replicas
from ringcomm.parallel.parameter_server.serving import Serving
from ringcomm.parallel.parameter_server.shard import Shard
from ringcomm.parallel.parameter_server.start import group_of_its_own, start_from_first
from ringcomm.parallel.parameter_server.worker import Worker

__all__ = ["Assembly"]


@dataclass(frozen=True)
class Assembly:
    """All that is known before ranks talk.

    Attributes:
        owned: by server with keys, their indices; the same on all ranks.
        workers: their ranks.
    """

    resolved: dist.ProcessGroup
    options: Options
    make_optimizer: MakeOptimizer
    devices: list[torch.device]
    replicas: Replicas
    keys: list[Key]
    groups: list[dict[str, Any]]
    owned: dict[int, list[int]]
    workers: tuple[int, ...]

    @classmethod
    def checked(
        cls,
        model: nn.Module | Sequence[nn.Module],
        make_optimizer: MakeOptimizer,
        group: dist.ProcessGroup | None,
        param_groups: Iterable[Any] | None,
        server_devices: Sequence[torch.device | str],
        options: Options,
    ) -> Self:
        """Raises TypeError or ValueError where arguments cannot be."""
        modules = [model] if isinstance(model, nn.Module) else list(model)
        if not modules or not all(isinstance(module, nn.Module) for module in modules):
            raise TypeError("wants a model, or a list of replicas of one, first")
        if not callable(make_optimizer):
            raise TypeError(
                "make_optimizer makes an optimizer of parameters, such as lambda params:"
                f" torch.optim.SGD(params, lr=0.1); got a {type(make_optimizer).__name__}"
            )
        devices = [torch.device(device) for device in server_devices]
        if not devices:
            raise ValueError("server_devices is empty: give at least the CPU")
        resolved = resolve_group(group)
        keys = keys_of(modules[0], options.wire_dtype)
        return cls(
            resolved=resolved,
            options=options,
            make_optimizer=make_optimizer,
            devices=devices,
            replicas=Replicas(modules),
            keys=keys,
            groups=groups_of_keys(param_groups, modules[0], keys),
            owned=_owned(keys, options.servers),
            workers=options.workers(resolved.size()),
        )

    def meet(self) -> dist.ProcessGroup:
        """A group for the messages, in which all ranks agree and have rank 0's weights. Collective.

        Raises:
            ValueError: they do not agree; nothing has been changed.
        """
        group = group_of_its_own(self.resolved)
        mine = {
            "options": self.options,
            "parameters": {key.name: (tuple(key.shape), str(key.dtype)) for key in self.keys},
            "parameter groups": [indices["params"] for indices in self.groups],
        }
        try:
            check_agreement(mine, group)
        except ValueError:
            dist.destroy_process_group(group)
            raise
        start_from_first(self.replicas.modules, group)
        return group

    def serving(self, group: dist.ProcessGroup) -> Serving | None:
        """This rank's server, if it has keys."""
        rank = group.rank()
        if rank not in self.owned:
            return None
        indices = self.owned[rank]
        optimizer = None
        if self.options.updates_at == "server":
            params = self.replicas.params
            optimizer = ServerOptimizer(
                self.make_optimizer,
                self.groups,
                {index: params[index] for index in indices},
                self.keys,
                self.devices,
                keeps_master=any(key.dtype != key.wire_dtype for key in self.keys),
            )
        packing = self._packing(indices)
        shard = Shard(packing, self.workers, self.options, optimizer)
        remote = [worker for worker in self.workers if worker != rank]
        return Serving(shard, Channel(group), packing, remote)

    def worker(self, group: dist.ProcessGroup, serving: Serving | None) -> Worker | None:
        """This rank's working part; None on a dedicated server."""
        rank = group.rank()
        if rank not in self.workers:
            return None
        ports: list[Port] = []
        for server, indices in self.owned.items():
            packing = self._packing(indices)
            if server == rank and serving is not None:
                ports.append(LocalPort(serving, rank, indices, packing))
            else:
                ports.append(RemotePort(Channel(group), server, indices, packing))
        optimizer = None
        if self.options.updates_at == "worker":
            params = dict(enumerate(self.replicas.params))
            optimizer = optimizer_of(self.make_optimizer, self.groups, params)
        given = self.options.loss_scale
        scale = None if given is None else LossScale(given)
        return Worker(ports, self.replicas, self.keys, optimizer, serving, scale)

    def _packing(self, indices: Sequence[int]) -> Packing:
        return Packing.of_keys(self.keys[index] for index in indices)


def _owned(keys: Sequence[Key], servers: Sequence[int]) -> dict[int, list[int]]:
    owned: dict[int, list[int]] = {}
    for index, place in enumerate(assign([key.num_bytes for key in keys], len(servers))):
        owned.setdefault(servers[place], []).append(index)
    return dict(sorted(owned.items()))
