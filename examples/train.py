#!/usr/bin/env python3
"""Train a small Llama-style model over two c10d backends, side by side.

Run it as ``python examples/train.py`` (it forks the ranks itself) or under a launcher:
``torchrun --nproc-per-node 2 examples/train.py`` (it then finds RANK and WORLD_SIZE and does not).
"""

import os
import sys

# Before torch is imported: one thread per rank. The ranks share the cores, and a parent that had
# started OpenMP threads could not be forked safely.
for _name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")


def main() -> int:
    """Imports late, so that Ctrl-C during the import of torch ends quietly as well."""
    try:
        from training.cli import main as run
    except KeyboardInterrupt:
        return 130
    return run(sys.argv[1:])


if __name__ == "__main__":
    _code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's clean-up, which takes up to a second with torch loaded: Ctrl-C is
    # to be over in 2 s. Nothing is left to clean; the ranks have ended.
    os._exit(_code)
