"""What verify_gpu.py runs, in the order of what a minute tells: a row of the docs each.

The docs are docs/gpu-verification.md. A command's words may hold {out}, the folder of results, and
{nccl}, "--nccl-library FILE" where one was given. A need that the machine does not meet leaves the
entry out, and says so.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

CURVE = "1k,4k,16k,64k,256k,1m,4m,16m,64m,256m"
SWEEP = "-m ringcomm bench all_reduce --device cuda --peers nccl --repeats 0 {nccl}"
STEP = "benchmarks/fused_update.py --device cuda --layout one --dtype bfloat16 --repeats 0 {nccl}"
RECORDS = "--json {out}/records.jsonl"
UNDER_MPS = "tools/gpu_layouts.py --only one-2-mps --"
TRITON = "-m pytest -q -m gpu tests/python/ops/test_triton.py"
LOSSES = f"{TRITON} tests/python/ops/test_cross_entropy.py"


@dataclass(frozen=True)
class Entry:
    """A row of the table.

    Attributes:
        name: of the row.
        command: of this Python, words as a shell has them; "make ..." for a target.
        limit_s: the longest it may take.
        needs: of "mps", "gpus" (two or more), "nccl_shared" (an NCCL that lets ranks share a GPU)
            and names of modules.
        not_scripted: why there is no command.
    """

    name: str
    command: str = ""
    limit_s: float = 120.0
    needs: tuple[str, ...] = ()
    not_scripted: str = ""

    def words(self, out: str, nccl: str) -> list[str]:
        """The command's words, with what stands for the machine filled in."""
        return shlex.split(self.command.format(out=out, nccl=nccl))


def _sweep(name: str, world: int, limit_s: float = 150.0) -> Entry:
    where = f"--layout one --mps --world-size {world} --sizes {CURVE} --dtype bfloat16,float32"
    how = f"--graph 20 --seconds 0.6 --plot {{out}}/all_reduce-w{world}.png {RECORDS}"
    return Entry(name, f"{SWEEP} {where} {how}", limit_s, ("mps",))


ENTRIES = (
    # ---- groups on GPUs
    Entry("facts", "tools/gpu_facts.py", 90.0),
    Entry("build", "make build", 420.0),
    Entry(
        "collectives", f"{UNDER_MPS} tests/python/device/test_gpu_collectives.py", 240.0, ("mps",)
    ),
    _sweep("speed-2", 2),
    Entry("graphs", f"{UNDER_MPS} tests/python/device/test_gpu_graphs.py", 180.0, ("mps",)),
    Entry("streams", f"{UNDER_MPS} tests/python/device/test_gpu_streams.py", 180.0, ("mps",)),
    Entry("fused", f"{UNDER_MPS} tests/python/device/test_gpu_fused_update.py", 180.0, ("mps",)),
    Entry("faults", f"{UNDER_MPS} tests/python/device/test_gpu_faults.py", 240.0, ("mps",)),
    Entry("memory", f"{UNDER_MPS} tests/python/device/test_gpu_memory.py -s", 120.0, ("mps",)),
    _sweep("speed-4", 4),
    _sweep("speed-8", 8, 200.0),
    *(
        Entry(
            f"fused-speed-{world}",
            f"{STEP} --mps --world {world} --sizes 67108864,268435456 --seconds 1.5 {RECORDS}",
            90.0,
            ("mps",),
        )
        for world in (2, 4, 8)
    ),
    Entry(
        "fused-speed-lomo",
        f"{STEP} --mps --world 2 --optimizer lomo --sizes 268435456 --seconds 1 {RECORDS}",
        60.0,
        ("mps",),
    ),
    Entry(
        "speed-without-mps",
        f"{SWEEP} --layout one --world-size 2 --sizes 1k,1m,64m --seconds 1 {RECORDS}",
        90.0,
    ),
    Entry("models", f"{UNDER_MPS} tests/python/device/test_gpu_models.py", 240.0, ("mps",)),
    Entry("ranks-4", "tools/gpu_layouts.py --only one-4-mps", 480.0, ("mps",)),
    Entry("without-mps", "tools/gpu_layouts.py --only one-2", 480.0),
    Entry("ranks-8", "tools/gpu_layouts.py --only one-8-mps", 480.0, ("mps",)),
    Entry("all-gpus", "tools/gpu_layouts.py --only all,all-twice-mps", 540.0, ("gpus",)),
    Entry(
        "speed-all-gpus",
        f"{SWEEP} --layout all --world-size 0 --sizes {CURVE} --dtype bfloat16,float32 --graph 20"
        f" --seconds 0.6 --plot {{out}}/all_reduce-all.png {RECORDS}",
        150.0,
        ("gpus",),
    ),
    Entry("ranks-as-threads", not_scripted="the tests have no ranks that are threads"),
    Entry("p2p", not_scripted="the ring over NCCL's send and receive wants a GPU for each rank"),
    # ---- kernels
    Entry("cross-entropy-kernels", f"{LOSSES} -k 'cpu_does or float64'", 180.0, ("triton",)),
    Entry("cross-entropy-errors", f"{TRITON} -k errors_are", 120.0, ("triton",)),
    Entry("cross-entropy-graph", f"{TRITON} -k 'LossOnGpu and graph'", 90.0, ("triton",)),
    Entry("cross-entropy-memory", f"{TRITON} -k 'LossOnGpu and memory'", 90.0, ("triton",)),
    Entry("update-kernels", f"{TRITON} -k 'UpdatesOnGpu and oracle'", 180.0, ("triton",)),
    Entry("update-waits", f"{TRITON} -k 'UpdatesOnGpu and (graph or memory)'", 90.0, ("triton",)),
    Entry("update-errors", f"{TRITON} -k product_is", 120.0, ("triton",)),
    Entry(
        "cross-entropy-speed",
        "-m ringcomm bench cross_entropy --device cuda --tokens 8192 --dtypes bfloat16"
        " --vocabularies 32000,50257,128256 --peers torch,compile --seconds 2 --repeats 0"
        f" {RECORDS}",
        180.0,
        ("triton",),
    ),
    Entry(
        "linear-updates",
        f"benchmarks/device_kernels.py --device cuda --only linear {RECORDS}",
        120.0,
        ("triton",),
    ),
    Entry(
        "other-updates",
        f"benchmarks/device_kernels.py --device cuda --only embedding,sgd {RECORDS}",
        90.0,
        ("triton",),
    ),
    Entry(
        "linear-cross-entropy",
        f"benchmarks/device_kernels.py --device cuda --only linear_loss {RECORDS}",
        120.0,
        ("triton",),
    ),
    Entry(
        "llama-memory",
        f"benchmarks/llama_memory.py --device cuda {RECORDS}",
        240.0,
        ("triton", "transformers"),
    ),
    Entry(
        "llama-largest",
        f"benchmarks/llama_memory.py --device cuda --grow {RECORDS}",
        300.0,
        ("triton", "transformers"),
    ),
    Entry(
        "main-job",
        "-m torch.distributed.run --standalone --nproc-per-node 2 examples/train.py --steps 20",
        180.0,
    ),
    Entry("cpu-tests", "make test-python \"ARGS=-m 'not gpu and not slow'\"", 540.0),
    # ---- what no script does yet
    Entry("vocab-parallel", not_scripted="two ranks of cpu:ringcomm,cuda:nccl want two GPUs"),
    Entry("triton-versions", not_scripted="a newer torch has to be brought along"),
    Entry("cross-entropy-plans", not_scripted="plans are constants of triton_kernels.py"),
    Entry("update-plans", not_scripted="plans are constants of triton_kernels.py"),
    *(
        Entry(name, not_scripted="its tests make their models on the CPU")
        for name in (
            *("optim-on-gpus", "zero", "offload", "activations", "parameter-server"),
            *("tensor-parallel", "pipeline", "experts", "planner"),
        )
    ),
)
