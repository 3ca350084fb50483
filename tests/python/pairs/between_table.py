"""The tables of whole loops: what happens between steps, and ranks of a mesh that differ."""

from __future__ import annotations

from collections.abc import Iterator

from pair_table import Case, Refused, Table, condition

# Of changes of weights, and of what a loop sees, as a share of their norm.
TOLERANCE = 1e-4
# Cells that are wrong today, and why: a case that has all of the values must fail. Delete what is
# mended; a case that passes although it is here fails the test, which names the line.
PENDING: dict[str, str] = {}

ACTIONS = (
    "none",
    "eval",
    "input gradient",
    "deepcopy",
    "generate",
    "state_dict",
    "exception in forward",
    "exception in backward",
    "save and load",
    "freeze",
)

BETWEEN = Table(
    axes={
        "system": (
            *("zero 1", "zero 2", "zero 3", "infinity", "Lomo", "AdaLomo"),
            *("tensor", "pipeline", "mesh"),
        ),
        "between steps": ACTIONS,
        "buffers": ("none", "random", "BatchNorm"),
        "labels": ("full", "padded", "none on a rank"),
        "scheduler": ("after", "before"),
        "seeds": ("equal", "per rank"),
        "optimizer": ("AdamW", "SGD", "Adam", "a user's class", "Adafactor"),
        "leaving": ("together", "one by one"),
    },
    refused=(
        Refused(
            "system: zero 3; between steps: deepcopy",
            "RuntimeError: cannot be copied",
            "get_state_dict(model, full=True), and an average of the weights in it",
        ),
        Refused(
            "system: infinity; between steps: deepcopy",
            "RuntimeError: cannot be copied",
            "get_state_dict(model, full=True)",
        ),
        Refused(
            "system: infinity; between steps: state_dict",
            "RuntimeError: get_state_dict",
            "ringcomm.parallel.get_state_dict()",
        ),
        Refused(
            "system: infinity; optimizer: Adam or a user's class or Adafactor",
            r"TypeError|ValueError: ringcomm\.parallel\.offload",
            "an optimizer of ringcomm.parallel.offload",
        ),
        Refused(
            "system: tensor or mesh; optimizer: Adafactor",
            "TypeError: Adafactor .* is split over tensor-parallel ranks",
            "another optimizer, such as AdamW",
        ),
        Refused(
            "system: tensor or mesh; between steps: deepcopy",
            "RuntimeError: cannot be copied",
            "get_state_dict(model, full=True)",
        ),
        Refused(
            "system: pipeline; between steps: input gradient or generate",
            "TypeError|RuntimeError|AttributeError: [Pp]ipeline",
            "step() and evaluate(): a rank has a part of the model",
        ),
        Refused(
            "system: pipeline; between steps: deepcopy",
            "TypeError|RuntimeError: copied",
            "get_state_dict(train, full=True)",
        ),
        Refused(
            "system: pipeline; between steps: exception in forward or exception in backward",
            "ValueError|RuntimeError|RingcommError: an error of the user's|was aborted|stage",
            "a new process group and Pipeline: other ranks cannot wait for the stage",
        ),
        Refused(
            "system: pipeline; between steps: freeze",
            "ValueError: make a new Pipeline",
            "a new Pipeline of the same blocks",
        ),
    ),
    meaningless=(
        # Lomo and AdaLomo are the optimizers, and are made of the model.
        condition("system: Lomo or AdaLomo; optimizer: SGD or Adam or a user's class or Adafactor"),
        condition("system: Lomo or AdaLomo; scheduler: before"),
    ),
)

# What a person's program has around a model.
PROGRAM = Table(
    axes={
        "system": (
            "zero 1",
            "zero 2",
            "zero 3",
            *BETWEEN.axes["system"][3:6],
            "data",
            *BETWEEN.axes["system"][6:],
        ),
        "loss": (
            *("the model's", "mean", "shifts labels", "ignore_index=-1", "class weights"),
            "sum / num_items",
        ),
        "wrapper": (
            *("none", "DDP", "torch.compile", "checkpoint_wrapper", "adapters"),
            "a user's module",
        ),
        "default dtype": ("float32", "bfloat16", "float64"),
        "first forward": ("training", "no_grad", "inference_mode"),
        "trained": ("always", "thawed", "never"),
        "seeds": ("equal", "per rank"),
        "memory format": ("contiguous", "transposed", "channels_last"),
    },
    refused=(
        Refused(
            "wrapper: DDP",
            "ValueError|TypeError: DistributedDataParallel",
            "the model itself",
        ),
        Refused(
            "wrapper: a user's module; system: data; loss: the model's",
            "ValueError: has no loss: pass loss_fn",
            "loss_fn",
        ),
        Refused(
            "wrapper: a user's module or adapters; system: tensor or pipeline or mesh",
            "ValueError|TypeError: is not a model of transformers|has no|tensor-parallel plan",
            "the model itself; data parallelism and ZeRO for adapters",
        ),
        Refused(
            "wrapper: torch.compile; system: infinity",
            "ValueError: got a OptimizedModule",
            "stage 3, or no torch.compile",
        ),
        Refused(
            "memory format: transposed or channels_last; system: zero 3 or infinity",
            "NotImplementedError|ValueError: contiguous",
            "contiguous weights, or stage 1 or 2",
        ),
        Refused(
            "trained: thawed; system: Lomo or AdaLomo",
            "ValueError: requires grad since .* was made, which does not train it",
            "add_param_group()",
        ),
        Refused(
            "trained: thawed; system: pipeline",
            "ValueError|RingcommError: make a new Pipeline|was aborted",
            "a new Pipeline of the same blocks",
        ),
        Refused(
            "loss: shifts labels or ignore_index=-1 or class weights;"
            " system: data or tensor or pipeline or mesh",
            "LossError: loss_fn must be a mean|loss_fn is refused by rank",
            "a parameter num_items_in_batch, or count_items",
        ),
    ),
    meaningless=(),
)

# Ranks that do different things on a mesh: on four ranks, and on eight.
_MESH_AXES = {
    "zero": ("1", "0", "2", "3"),
    "schedule": ("1f1b", "gpipe", "interleaved", "zero-bubble", "zbv"),
    "used": ("all", "others on each rank", "one rank alone", "by nobody"),
    "tied": ("no", "yes"),
    "sizes": ("even", "uneven"),
    "between steps": ("none", "save and load"),
    "seeds": ("equal", "per rank"),
}
_WITHOUT_FSDP = "mesh: dp x tp or dp x pp or pp x tp or dp x pp x tp"
_WITH_FSDP = (
    "mesh: fsdp x pp or fsdp x tp or dp x fsdp"
    " or fsdp x pp x tp or dp x fsdp x pp or dp x fsdp x tp"
)
_MESH_REFUSED = (
    Refused(
        f"{_WITHOUT_FSDP}; zero: 3",
        "ValueError: shards over fsdp, which is 1",
        "a larger fsdp and a smaller dp",
    ),
    Refused(
        f"{_WITH_FSDP}; zero: 0",
        "ValueError: use dp instead of fsdp",
        "dp instead of fsdp",
    ),
    Refused(
        "mesh: fsdp x pp or fsdp x pp x tp or dp x fsdp x pp; zero: 3; schedule: zbv; tied: yes",
        "ValueError: which ends the tie",
        "another schedule, such as 1f1b, or stage 1 or 2",
    ),
)
_MESH_MEANINGLESS = (
    condition(
        "mesh: dp x tp or fsdp x tp or dp x fsdp or dp x fsdp x tp;"
        " schedule: gpipe or interleaved or zero-bubble or zbv"
    ),
    condition("mesh: pp x tp; used: others on each rank or one rank alone"),
    condition("mesh: dp x pp or fsdp x pp or dp x fsdp or dp x fsdp x pp; sizes: uneven"),
)
MESHES = Table(
    axes={
        "mesh": ("dp x tp", "dp x pp", "fsdp x pp", "fsdp x tp", "dp x fsdp", "pp x tp"),
        **_MESH_AXES,
        "labels": ("full", "padded", "none on a rank"),
        "optimizer": ("AdamW", "SGD"),
        "micro-batches": ("2", "4"),
        "recompute": ("no", "yes"),
    },
    refused=_MESH_REFUSED,
    meaningless=_MESH_MEANINGLESS,
)
CUBES = Table(
    axes={
        "mesh": ("dp x pp x tp", "fsdp x pp x tp", "dp x fsdp x pp", "dp x fsdp x tp"),
        **_MESH_AXES,
        "schedule": ("1f1b", "interleaved", "zbv"),
    },
    refused=_MESH_REFUSED,
    meaningless=_MESH_MEANINGLESS,
    strength=3,
)
TABLES = {
    "Between steps": BETWEEN,
    "A person's program": PROGRAM,
    "Meshes whose ranks differ": MESHES,
    "Meshes of three axes": CUBES,
}


def pending_of(case: Case) -> list[str]:
    """The lines of PENDING that a case is wrong for."""
    return [
        words
        for words in PENDING
        if any(
            all(each.get(axis) in values for axis, values in condition(words).items())
            for each in views_of(case)
        )
    ]


def views_of(case: Case) -> Iterator[Case]:
    """A case, and for each axis of its mesh the system that it is."""
    yield case
    if "mesh" not in case or "system" in case:
        return
    axes, stage = case["mesh"].split(" x "), case["zero"]
    systems = [name for axis, name in (("pp", "pipeline"), ("tp", "tensor")) if axis in axes]
    # fully_shard in a pipeline, with an optimizer of torch, is not zero.shard().
    if stage != "0" and not (stage == "3" and "pp" in axes):
        systems.append(f"zero {stage}")
    for system in systems:
        yield {**case, "system": system}
