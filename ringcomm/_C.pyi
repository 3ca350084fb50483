"""The compiled engine; see csrc/bindings/module.cc."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

BUILT_FOR: str

def create_process_group(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    algorithm: str,
    is_rank_ordered: bool,
    one_shot_max_bytes: int,
    transport: str,
    p2p_backend: str,
    says_waits: bool,
    group_name: str,
    global_ranks: list[int],
) -> ProcessGroupRingcomm: ...

class GroupOptions:
    """What a group was made with, as torch.distributed.split_group hands it on."""

    algorithm: str
    is_rank_ordered: bool
    one_shot_max_bytes: int
    transport: str
    p2p_backend: str
    says_waits: bool

class ProcessGroupRingcomm:
    """A torch.distributed.Backend."""

    options: GroupOptions
    def get_error(self) -> Any: ...
    def perform_nocolor_split(self, device: Any) -> None: ...

def stats() -> dict[tuple[str, str], dict[str, int]]: ...
def group_stats(backend: Any) -> dict[tuple[str, str], dict[str, int]]: ...
def transport_of(backend: Any) -> str: ...
def device_transports(backend: Any) -> dict[str, str]: ...
def mapped_bytes(backend: Any) -> int: ...
def flight_records() -> list[bytes]: ...
def flight_clock() -> tuple[int, int]: ...
def start_trace(events_fd: int, log_fd: int, num_events: int) -> None: ...
def empty_shared_on(
    backend: Any, device: torch.device, sizes: Sequence[int], dtype: torch.dtype
) -> torch.Tensor: ...
def empty_shared(sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor: ...
def is_shared(tensor: torch.Tensor) -> bool: ...
def shared_memory_usage() -> dict[str, int]: ...
def cgroup_limits(proc: str, cgroups: str) -> dict[str, tuple[float, str] | None]: ...
def say_last_words(text: str) -> None: ...
def say_exit() -> None: ...
def simd_level() -> str: ...

class eager:
    """Operators without torch's dispatcher; None where torch.ops.ringcomm must be called."""

    @staticmethod
    def all_reduce(
        tensor: torch.Tensor, reduce_op: str, group: Any, out: torch.Tensor | None
    ) -> torch.Tensor | None: ...
    @staticmethod
    def reduce_scatter(
        tensor: torch.Tensor, reduce_op: str, group_name: str
    ) -> torch.Tensor | None: ...
    @staticmethod
    def all_gather(tensor: torch.Tensor, group_name: str) -> torch.Tensor | None: ...
    @staticmethod
    def broadcast(tensor: torch.Tensor, src: int, group_name: str) -> torch.Tensor | None: ...
    @staticmethod
    def reduce(
        tensor: torch.Tensor, dst: int, reduce_op: str, group_name: str
    ) -> torch.Tensor | None: ...
