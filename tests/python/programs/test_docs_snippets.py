"""Every Python and shell block of README and docs runs.

A Python block with a title is a file of its page, and the page's shell blocks run beside it. A text
block behind a shell block has lines of its output. A Python block without a title runs on two ranks
of a group, with the names of `scene()`; `model` is a Llama of transformers if it is called with
`**batch`. `<!-- test: compile -->` before a block says that it is only compiled: it needs a GPU,
another host, a network or minutes.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import quick
from rank_programs import run_command
from ranks import run_ranks
from sequence_side import MOVED, REDUCED, Call
from sequences import POOLS, WAIT_S, WORLD, Case, run_case
from torch import Tensor, nn

from ringcomm import Options
from ringcomm.options import known_variables, unknown_variables

ROOT = Path(__file__).resolve().parents[3]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FENCE = re.compile(
    r"^(?:<!-- test: ([^>]*) -->\n)?```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.M | re.S
)
WORDS = {"", "compile"}
LANGUAGES = {"python", "sh", "text", "yaml", "toml", "json", "diff", "bibtex"}
NUM_BATCHES = 4
LIMIT_S = 240


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    word: str
    language: str
    title: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            str(page.relative_to(ROOT)),
            text.count("\n", 0, match.start(4)) + 1,
            *match.groups(default=""),
        )
        for match in FENCE.finditer(text)
    ]


BLOCKS = {str(page.relative_to(ROOT)): blocks_of(page) for page in PAGES}


EVERY = [block for blocks in BLOCKS.values() for block in blocks]


def place_of(block: Block) -> str:
    return f"{block.page}:{block.line}"


def test_marks_and_languages_are_known() -> None:
    for page in PAGES:
        blocks = blocks_of(page)
        assert len(blocks) == len(re.findall(r"^ *```\w", page.read_text("utf-8"), re.M)), page
        for block in blocks:
            assert block.word in WORDS, block
            assert block.language in LANGUAGES, block


COMPILED = [b for b in EVERY if b.language in ("python", "sh") and b.word == "compile"]


@pytest.mark.parametrize("block", COMPILED, ids=place_of)
def test_it_compiles(block: Block) -> None:
    if block.language == "python":
        compile(block.text, block.page, "exec")
    else:
        subprocess.run(["bash", "-n", "-c", block.text], check=True, timeout=LIMIT_S)


def is_command(block: Block) -> bool:
    return block.language == "sh" and block.word != "compile"


PAGES_OF_COMMANDS = [page for page, blocks in BLOCKS.items() if any(map(is_command, blocks))]


@pytest.mark.parametrize("page", quick(PAGES_OF_COMMANDS, "README.md"))
def test_its_commands_run(page: str, tmp_path: Path) -> None:
    blocks = BLOCKS[page]
    if not any(point.name == "ringcomm" for point in entry_points(group="torch.backends")):
        pytest.skip("ringcomm is not installed (built in place only), so torch does not know it")
    if any("transformers" in block.text for block in blocks if block.title):
        pytest.importorskip("transformers")
    for block in blocks:
        if block.title:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
    # torchrun takes a free port, and writes a file for each rank, whose lines stay whole.
    logs = tmp_path / "logs of ranks"
    torchrun = {"PET_STANDALONE": "1", "PET_TEE": "3", "PET_LOG_DIR": str(logs)}
    environment = {"OMP_NUM_THREADS": "1", **torchrun}
    environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    output = ""
    for block in blocks:
        if is_command(block):
            shutil.rmtree(logs, ignore_errors=True)
            command = ("bash", "-e", "-c", block.text)
            done = run_command(*command, env=environment, cwd=tmp_path, timeout_s=LIMIT_S)
            assert done.returncode == 0, f"{place_of(block)}\n{done.stdout}\n{done.stderr}"
            output = done.stdout + "".join(path.read_text("utf-8") for path in logs.rglob("*.log"))
        elif block.language == "text":
            missing = set(block.text.splitlines()) - set(output.splitlines())
            assert not missing, output


def is_llama(block: Block) -> bool:
    return "**batch" in block.text


def scene(rank: int, block: Block, folder: Path) -> tuple[dict[str, Any], list[float]]:
    """The names that fragments use, and the losses that they will have computed."""
    losses: list[float] = []
    # What is sharded, or goes through tensor-parallel layers, is the same on all ranks.
    is_shared = any(word in block.text for word in ("activations.", "ParallelLinear", "pipeline."))
    model, batches = llama() if is_llama(block) else layers(0 if is_shared else rank)

    def loss_of(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        loss: Tensor = nn.functional.mse_loss(model(batch[0]).float(), batch[1])
        losses.append(float(loss.detach()))
        return loss

    torch.manual_seed(rank)
    logits = torch.randn(4, 10, requires_grad=True) * 2
    names = {
        "dist": torch.distributed,
        "torch": torch,
        "folder": folder,
        "group": torch.distributed.group.WORLD,
        "model": model,
        "batches": batches,
        "batch": batches[0],
        "loss_of": loss_of,
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
        "logits": logits,
        "target": torch.tensor([0, 3, 9, 5]),
        "shard": logits.detach()[:, 5 * rank : 5 * rank + 5].clone().requires_grad_(),
        "start": 5 * rank,
        "hidden": torch.randn(4, 6, requires_grad=True),
        "weight": torch.randn(10, 6, requires_grad=True),
    }
    return names, losses


def layers(seed: int) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 17), nn.Tanh(), nn.Linear(17, 2))
    )
    torch.manual_seed(seed)
    x = torch.randn(8, 6)
    return model, [(x, x[:, :2].sin())] * NUM_BATCHES


def llama() -> tuple[nn.Module, Any]:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: Any = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=32, num_attention_heads=2, **sizes))
    ids = torch.arange(16).reshape(2, 8)
    return model, [{"input_ids": ids, "labels": ids}] * NUM_BATCHES


def run_fragment(rank: int, block: Block, folder: Path) -> list[float]:
    names, losses = scene(rank, block, folder)
    exec(compile(block.text, f"{block.page}:{block.line}", "exec"), names)
    return losses or names.get("losses", [])


FRAGMENTS = [b for b in EVERY if b.language == "python" and not b.title and b.word != "compile"]
QUICK = [block for block in FRAGMENTS if not is_llama(block)]


@pytest.mark.parametrize("block", quick(FRAGMENTS, *QUICK), ids=place_of)
def test_its_lines_run(block: Block, tmp_path: Path) -> None:
    """And train, if they compute losses."""
    if is_llama(block):
        pytest.importorskip("transformers")
    for losses in run_ranks(2, run_fragment, block, tmp_path):
        assert len(losses) == (NUM_BATCHES if "loss_of" in block.text or losses else 0)
        assert not losses or losses[-1] < losses[0]


# ---- tables that a user relies on: environment variables, promises, calls and their dtypes

READS = re.compile(r'(?:environ(?:\.get\(|\.pop\(|\[)|getenv\()\s*"(RINGCOMM_\w+)"')
VARIABLES = ROOT / "docs" / "reference" / "environment.md"


def test_the_page_lists_the_environment_variables_that_are_read() -> None:
    listed = set(re.findall(r"^\| `(RINGCOMM_\w+)`", VARIABLES.read_text(encoding="utf-8"), re.M))
    read: set[str] = set()
    read_by_build: set[str] = set()
    for folder in ("csrc", "kernels", "ringcomm"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".cc", ".h"):
                text = path.read_text(encoding="utf-8")
                read |= set(re.findall(r'getenv\("(RINGCOMM_\w+)"', text))
    for path in (*(ROOT / "ringcomm").rglob("*.py"), ROOT / "_ringcomm/autoload.py"):
        read |= set(READS.findall(path.read_text(encoding="utf-8")))
    read |= {f"RINGCOMM_{field.name.upper()}" for field in fields(Options)}
    for path in (ROOT / "setup.py", *(ROOT / "tools").glob("*.py")):
        read_by_build |= set(re.findall(r'"(RINGCOMM_\w+)"', path.read_text(encoding="utf-8")))
    assert read
    assert read_by_build
    assert listed == read | read_by_build == known_variables()


def test_a_group_warns_of_a_mistyped_variable_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*known_variables(), "RINGCOMM_ALGO"):
        monkeypatch.setenv(name, "1")
    assert unknown_variables() == {"RINGCOMM_ALGO": "RINGCOMM_ALGORITHM"}


# ---- docs/reliability.md: each promise names tests that exist

TEST = re.compile(r"`(tests/[\w/.]+)::([^`]+)`")


def promises(text: str) -> list[str]:
    """The rows of the table of promises."""
    table = text.partition("## Promises")[2].partition("\n## ")[0]
    return [line for line in table.splitlines() if line.startswith("|")][2:]


def missing(rows: list[str]) -> list[str]:
    """Rows that name no test, and tests that do not exist."""
    wrong = [row for row in rows if not TEST.search(row)]
    for file, name in TEST.findall("\n".join(rows)):
        path = ROOT / file
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        begin = f"def {name}(" if path.suffix == ".py" else f'TEST_CASE("{name}"'
        if begin not in text:
            wrong.append(f"{file}::{name}")
    return wrong


def test_each_promise_has_its_tests() -> None:
    rows = promises((ROOT / "docs" / "reliability.md").read_text(encoding="utf-8"))
    assert len(rows) >= 20
    assert missing(rows) == []


# ---- the table of calls in docs/reference/backend.md, cell by cell

BACKEND = ROOT / "docs" / "reference" / "backend.md"
DTYPES = {"numbers": REDUCED, "any": MOVED, "–": ("float32",)}
# Kinds of calls that have another name, or several names, in the table.
KINDS = {
    "all_reduce_coalesced": "coalesced",
    "send": "send_and_receive",
    "recv": "send_and_receive",
    "isend": "messages",
    "irecv": "messages",
    "batch_isend_irecv": "messages",
    "monitored_barrier": "barrier",
}


def claims() -> list[tuple[list[str], list[str], str]]:
    """Of each row: the calls, the transports that have them, the name of the dtypes."""
    text = BACKEND.read_text(encoding="utf-8")
    table = text.split("<!-- support: begin -->")[1].split("<!-- support: end -->")[0]
    header, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.split("\n") if line
    ]
    transports = header[1:-1]
    return [
        (
            re.findall(r"`(\w+)`", row[0]),
            [name for name, cell in zip(transports, row[1:-1], strict=True) if cell == "yes"],
            row[-1],
        )
        for row in rows
    ]


@pytest.mark.parametrize("transport", ["shm", "messages"])
def test_what_the_table_claims(transport: str, tmp_path: Path) -> None:
    calls = []
    for names, transports, dtypes in claims():
        for name, dtype in product(names if transport in transports else [], DTYPES[dtypes]):
            is_batch, is_monitored = name == "batch_isend_irecv", name == "monitored_barrier"
            kind = KINDS.get(name, name)
            options: dict[str, Any] = {"dtype": dtype, "size": 6, "root": 1}
            calls.append(Call(kind, **options, variety=int(is_batch), uneven=int(is_monitored)))
    assert len(calls) > 200
    np.zeros(WORLD, np.int64).tofile(tmp_path / "marks")
    args = Case(tuple(dict.fromkeys(calls)), pool=transport), 1, str(tmp_path / "marks")
    env = POOLS[transport]
    assert run_ranks(WORLD, run_case, *args, env=env, group_timeout_s=WAIT_S) == [[]] * WORLD
