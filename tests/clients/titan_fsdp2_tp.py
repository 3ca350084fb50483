"""torchtitan's Llama debug model with FSDP2 over 2 ranks and tensor parallelism over 2."""

from __future__ import annotations

from pathlib import Path

from support import report

REQUIREMENTS = ("torchtitan==0.3.0",)
RANKS = 4
IS_SHORT = False


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    from titan import train

    return train(folder, data_parallel_shard_degree=2, tensor_parallel_degree=2)


if __name__ == "__main__":
    report(main)
