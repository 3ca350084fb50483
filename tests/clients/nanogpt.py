"""nanoGPT's train.py, 40 iterations on generated tokens, on the CPU."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import re
import runpy
import shutil
import sys
from pathlib import Path

import numpy as np
from parameters import checksums
from support import report

REQUIREMENTS = ()
RANKS = 2
IS_SHORT = False
SOURCE = ("karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291")

# train.py uses CUDA wherever there is more than one rank, whatever --device says.
REPLACEMENTS = {
    "device = f'cuda:{ddp_local_rank}'": "device = 'cpu'",
    "    torch.cuda.set_device(device)\n": "",
    "DDP(model, device_ids=[ddp_local_rank])": "DDP(model)",
}
OPTIONS = {
    "backend": "gloo",
    "device": "cpu",
    "dtype": "float32",
    "compile": False,
    "dataset": "generated",
    "n_layer": 2,
    "n_head": 4,
    "n_embd": 64,
    "block_size": 64,
    "batch_size": 8,
    "dropout": 0.1,
    "gradient_accumulation_steps": 4,
    "max_iters": 40,
    "lr_decay_iters": 40,
    "warmup_iters": 5,
    "eval_interval": 20,
    "eval_iters": 4,
}
VOCABULARY = 256


def write_tokens(folder: Path) -> None:
    """Random walks over the vocabulary, so that there is something to learn."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for name, count in (("train", 20_000), ("val", 4_000)):
        tokens = np.cumsum(generator.integers(-2, 3, count)) % VOCABULARY
        tokens.astype(np.uint16).tofile(folder / f"{name}.bin")
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": VOCABULARY}))


def adapted(folder: Path, source: Path) -> Path:
    """A copy of the program in which several ranks train on the CPU."""
    for name in ("model.py", "configurator.py"):
        shutil.copy(source / name, folder)
    text = (source / "train.py").read_text()
    for old, new in REPLACEMENTS.items():
        assert text.count(old) == 1, f"train.py has {text.count(old)} times {old!r}"
        text = text.replace(old, new)
    program = folder / "train.py"
    program.write_text(text)
    write_tokens(folder / "data" / "generated")
    return program


def main(folder: Path, source: Path | None) -> dict[str, list[float]]:
    assert source is not None
    folder = folder / f"rank{os.environ['RANK']}"  # each rank writes a copy
    folder.mkdir()
    program = adapted(folder, source)
    os.chdir(folder)
    sys.argv = [str(program), *(f"--{name}={value}" for name, value in OPTIONS.items())]
    sys.path.insert(0, str(folder))
    output = io.StringIO()
    with checksums() as parameters, contextlib.redirect_stdout(output):
        runpy.run_path(str(program), run_name="__main__")
    assert len(parameters) == 41  # it trains for one iteration more than max_iters
    printed = re.findall(r"loss (\d+\.\d+)", output.getvalue())
    return {"parameters": parameters, "losses": [float(loss) for loss in printed]}  # of rank 0


if __name__ == "__main__":
    report(main)
