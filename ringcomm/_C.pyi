"""The compiled engine; see csrc/bindings/module.cc."""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

def create_process_group(
    store: Any,
    rank: int,
    size: int,
    timeout: timedelta,
    algorithm: str,
    is_rank_ordered: bool,
    num_slots: int,
    slot_bytes: int,
    one_shot_max_bytes: int,
    transport: str,
    p2p_backend: str,
    make_messages: Callable[[], Any] | None,
) -> Any: ...
def stats() -> dict[tuple[str, str], dict[str, int]]: ...
def group_stats(backend: Any) -> dict[tuple[str, str], dict[str, int]]: ...
def transport_of(backend: Any) -> str: ...
def mapped_bytes(backend: Any) -> int: ...
def simd_level() -> str: ...
