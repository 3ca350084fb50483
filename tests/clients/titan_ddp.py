"""torchtitan's Llama debug model with replicated weights."""

from __future__ import annotations

from pathlib import Path

from support import report

REQUIREMENTS = ("torchtitan==0.3.0",)
RANKS = 2
IS_SHORT = False


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    from titan import train

    return train(folder, data_parallel_shard_degree=1, data_parallel_replicate_degree=2)


if __name__ == "__main__":
    report(main)
