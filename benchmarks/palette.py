"""The colours of plots and pages: each library has the same one wherever it is compared."""

from __future__ import annotations

from ringcomm.screen import COLORS

GREY = "#7f7f7f"
# Of what is no library, such as an algorithm: from Tol's muted colours, and black.
OTHERS = ("#332288", "#44aa99", "#882255", "#222222")

# By the name of a backend or a library in records.
LIBRARIES = {
    "ringcomm": COLORS["blue"],
    "in place": "#12355b",  # ringcomm's losses in their logits, and by Triton
    "triton": "#5f8fd3",
    "gloo": COLORS["orange"],
    "mpi4py": COLORS["green"],
    "nccl": COLORS["pink"],
    "torch": COLORS["yellow"],
    "compile": COLORS["sky"],
    "liger": "#7a5195",
    "deepspeed": "#8c564b",
    "vllm": "#808000",
    "quack": "#b3446c",
    "copy": GREY,  # a copy of the data: no library
}
_TITLES = {
    "gloo": "Gloo",
    "mpi4py": "Intel MPI",
    "nccl": "NCCL",
    "compile": "torch.compile",
    "liger": "Liger",
    "deepspeed": "DeepSpeed",
    "vllm": "vLLM",
    "quack": "QuACK",
}


def title_of(library: str) -> str:
    """How a library is written, by its name in records."""
    return _TITLES.get(library, library)


def colors_of(names: list[str]) -> dict[str, str]:
    """A colour for each name: of a library its own, of others one that no library has, in order."""
    free = iter(OTHERS)
    return {name: LIBRARIES.get(name) or next(free, GREY) for name in names}
