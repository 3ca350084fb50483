"""Megatron-core's tensor parallelism over 2 ranks and its DDP over 2, on 4 ranks."""

from __future__ import annotations

from pathlib import Path

from support import report

REQUIREMENTS = ("megatron-core==0.16.1",)
RANKS = 4
IS_SHORT = False


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    from megatron_layers import train_all

    return train_all()


if __name__ == "__main__":
    report(main)
