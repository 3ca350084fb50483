"""The command line: reads and checks it, then runs the ranks."""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

import torch
import torch._dynamo  # DDP imports it (1 s); before the fork, so that no rank has to
import torch.distributed as dist

from ringcomm.parallel.pipeline import SCHEDULES
from training import launch
from training.checkpoint import FILE_NAME, Checkpoint, CheckpointError, load_checkpoint
from training.corpus import Corpus, CorpusError, load_corpus
from training.job import run_rank
from training.mesh import MeshSizes
from training.model import ALIASES, PRESETS
from training.options import (
    CONTEXT_BYTES,
    LEARN_ROWS_PER_RANK,
    RACE_TOKENS,
    InputError,
    Options,
)
from training.phases import run_phases
from training.race import race
from training.system import TrainState
from training.systems import MESH, OPTIMIZERS, PARALLELS, why_impossible

KNOWN_BACKENDS = ("ringcomm", "gloo", "nccl")
MAX_WORLD_SIZE = 1024
SIZES = (*ALIASES, *PRESETS)


def make_parser() -> argparse.ArgumentParser:
    """All options with their defaults; the only place that lists them."""
    parser = argparse.ArgumentParser(
        prog="train.py",
        description="Trains a small Llama-style model on text over a c10d backend, checks the "
        "losses against another backend and one process, and races the two.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--world", type=int, default=None, help="ranks (default 2, or what torchrun says)")
    add("--backend", default=None, metavar="A[,B]", help="A trains, B is compared and raced "
        "against; of ringcomm, gloo, nccl (default ringcomm,gloo)")  # fmt: skip
    add("--parallel", choices=PARALLELS, default=None,
        help="how the ranks share the work (default ddp)")  # fmt: skip
    add("--zero-stage", type=int, choices=(0, 1, 2, 3), default=None,
        help="the same as --parallel zero1, zero2, zero3; 0: ddp")  # fmt: skip
    add("--offload", choices=("cpu", "nvme"), default=None,
        help="optimizer state in host memory or files; at ZeRO stage 3 weights, too")  # fmt: skip
    add("--offload-path", type=Path, default=None, metavar="DIR",
        help="a folder on the disk for --offload nvme (default: the run's)")  # fmt: skip
    add("--partition-activations", action="store_true",
        help="recompute layers from their inputs, kept in shards under --parallel tp and in host "
        "memory with --offload")  # fmt: skip
    add("--tp", type=int, default=1, metavar="N", help="ranks that share each layer")
    add("--sp", action="store_true", help="these share the tokens between layers, too")
    add("--pp", type=int, default=1, metavar="N", help="stages of a pipeline")
    add("--schedule", choices=SCHEDULES, default=None, help="of the pipeline (default 1f1b)")
    add("--micro-batches", type=int, default=None, metavar="M",
        help="of the pipeline (default two for each stage)")  # fmt: skip
    add("--ep", type=int, default=1, metavar="N",
        help="ranks that share the experts, inside of data parallelism, which has all ranks that "
        "--tp times --pp leave")  # fmt: skip
    add("--experts", type=int, default=None, metavar="E",
        help="feed-forward networks of a layer; a token goes through two (default 0: one network; "
        "4 with --ep)")  # fmt: skip
    add("--optimizer", choices=OPTIMIZERS, default="adamw", help="what updates the weights")
    add("--clip-grad-norm", type=float, default=None, metavar="X",
        help="clip gradients to this norm, over all ranks of any mesh")  # fmt: skip
    add("--size", choices=SIZES, default="small", help="model that learns")
    add("--race-size", choices=SIZES, default="medium", help="model of the races")
    add("--text", type=Path, default=None, help="a file to learn instead of pydoc_data.topics")
    add("--steps", type=int, default=None, help="learn so many steps instead of --seconds")
    add("--seconds", type=float, default=35.0, help="learn so long")
    add("--race-seconds", type=float, default=35.0, help="race so long, all systems together")
    add("--no-race", dest="race", action="store_false", help="only learn")
    add("--tokens", choices=tuple(RACE_TOKENS), default="default",
        help="rows x bytes per rank in the races: 4x128, or small: 1x64")  # fmt: skip
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where to compute")
    add("--resume", type=Path, default=None, metavar="RUN", help="a run's folder or checkpoint")
    add("--out", type=Path, default=Path("runs"), help="folder that gets a folder per run")
    add("--seed", type=int, default=0, help="of weights, rows and the sample")
    return parser


def _world_size(asked: int | None, parallel: str) -> int:
    launched = os.environ.get("WORLD_SIZE") if "RANK" in os.environ else None
    if launched is not None and asked not in (None, int(launched)):
        raise InputError(f"--world {asked}: the launcher started {launched} ranks; leave it out")
    world_size = int(launched) if launched is not None else (2 if asked is None else asked)
    if world_size < 1:
        raise InputError(f"--world {world_size}: at least 1 rank is needed")
    if world_size > MAX_WORLD_SIZE:
        raise InputError(f"--world {world_size}: at most {MAX_WORLD_SIZE} ranks")
    if parallel == "single":
        if (asked or 1) > 1 or (launched is not None and world_size > 1):
            raise InputError("--parallel single is one process: leave --world out")
        return 1
    return world_size


def _parallel(asked: str | None, zero_stage: int | None) -> str:
    if zero_stage is None:
        return asked or "ddp"
    named = "ddp" if zero_stage == 0 else f"zero{zero_stage}"
    if asked not in (None, named):
        raise InputError(f"--zero-stage {zero_stage} is --parallel {named}, not {asked}")
    return named


def _mesh(args: argparse.Namespace) -> MeshSizes | None:
    """How ranks share the model, if they do; None for data parallelism alone."""
    sizes = MeshSizes(
        tp=args.tp,
        pp=args.pp,
        ep=args.ep,
        shares_tokens=args.sp,
        schedule=args.schedule or "1f1b",
        num_microbatches=0 if args.micro_batches is None else args.micro_batches,
        zero_stage=args.zero_stage or 0,
    )
    if min(sizes.tp, sizes.pp, sizes.ep, args.micro_batches or 1) < 1:
        raise InputError("--tp, --pp, --ep and --micro-batches are 1 or more")
    if args.pp == 1 and (args.schedule or args.micro_batches):
        raise InputError("--schedule and --micro-batches are the pipeline's: add --pp 2")
    if args.pp > 1 and args.partition_activations:
        raise InputError("--partition-activations is for models in one stage: leave out --pp")
    if sizes.is_one and not args.sp:
        return None
    if args.parallel not in (None, "ddp") and not args.zero_stage:
        raise InputError(f"--parallel {args.parallel} has a mesh of its own: leave it out")
    return sizes


def _check_rows(mesh: MeshSizes) -> None:
    """Whether rows and tokens divide, as many as learning takes."""
    num_rows = LEARN_ROWS_PER_RANK * mesh.tp * mesh.pp
    if mesh.pp > 1 and num_rows % mesh.num_microbatches_or_default:
        raise InputError(
            f"--micro-batches {mesh.num_microbatches}: {num_rows} rows do not divide into so many"
        )
    if mesh.shares_tokens and CONTEXT_BYTES % mesh.tp:
        raise InputError(f"--sp: {mesh.tp} ranks cannot share {CONTEXT_BYTES} tokens evenly")


def _check_offload(options: Options) -> None:
    if options.offload_path is not None and options.offload != "nvme":
        raise InputError("--offload-path is for --offload nvme")
    if options.offload_path is not None and not options.offload_path.is_dir():
        raise InputError(f"--offload-path {options.offload_path}: no such folder")
    if options.offload and options.parallel == "zero3" and options.backends != ("ringcomm",):
        raise InputError("--offload at ZeRO stage 3 runs over ringcomm: add --backend ringcomm")


def _check_backend(name: str, device: str, world_size: int) -> None:
    """Raises InputError where this machine has no such backend for the device."""
    if name == "ringcomm" and device == "cuda":
        raise InputError("ringcomm has no CUDA support yet: add --backend nccl")
    if name == "ringcomm" and name not in dist.Backend.backend_list:
        raise InputError(
            "--backend ringcomm: not installed in this Python; run `make build` "
            "(or pip install --no-build-isolation .), or try --backend gloo"
        )
    if name != "nccl":
        return
    if device == "cpu":
        raise InputError("--backend nccl sends GPU memory only: add --device cuda")
    if not dist.is_nccl_available():
        raise InputError("--backend nccl: this torch was built without NCCL")
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))  # of this machine: torchrun's
    num_gpus = torch.cuda.device_count()
    if num_ranks > num_gpus:
        raise InputError(
            f"--backend nccl: {num_ranks} ranks and {num_gpus} GPU(s), but NCCL refuses two ranks "
            "on one GPU; ask for fewer ranks, or try --backend gloo"
        )


def _backends(text: str, device: str, parallel: str, world_size: int) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not 1 <= len(names) <= 2:
        raise InputError(f"--backend {text}: one or two names, such as ringcomm,gloo")
    for name in names:
        if name not in KNOWN_BACKENDS:
            raise InputError(f"--backend {name}: one of {', '.join(KNOWN_BACKENDS)}")
    if parallel != "single":  # that uses none
        for name in names:
            _check_backend(name, device, world_size)
    return names


def read_options(argv: list[str]) -> Options:
    """Parses and checks what can be checked before anything is read.

    Raises:
        InputError: options that contradict each other or this machine.
        SystemExit: options that argparse refuses.
    """
    args = make_parser().parse_args(argv)
    for name in ("steps", "seconds", "race_seconds", "clip_grad_norm"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:  # nor NaN
            option = name.replace("_", "-")
            raise InputError(f"--{option} {value}: must be more than 0, and finite")
    # Not torch.cuda.is_available: after that no forked process could use CUDA.
    if args.device == "cuda" and torch.cuda.device_count() == 0:
        raise InputError("--device cuda: this torch finds no GPU; leave it out to use the CPU")
    mesh = _mesh(args)
    parallel = _parallel(args.parallel, args.zero_stage) if mesh is None else MESH
    world_size = _world_size(args.world, parallel)
    if args.backend is None:
        # ZeRO-Infinity knows no other backend to compare with.
        is_alone = parallel == "zero3" and args.offload is not None
        args.backend = "ringcomm" if is_alone else "ringcomm,gloo"
    options = Options(
        world_size=world_size,
        backends=_backends(args.backend, args.device, parallel, world_size),
        parallel=parallel,
        optimizer=args.optimizer,
        size=ALIASES.get(args.size, args.size),
        race_size=ALIASES.get(args.race_size, args.race_size),
        text=args.text,
        steps=args.steps,
        seconds=args.seconds,
        race_seconds=args.race_seconds,
        race=args.race,
        device=args.device,
        resume=args.resume,
        tokens=args.tokens,
        out=args.out,
        seed=args.seed,
        offload=args.offload,
        offload_path=args.offload_path,
        partition_activations=args.partition_activations,
        clip_grad_norm=args.clip_grad_norm,
        mesh=mesh,
        num_experts=(4 if args.ep > 1 else 0) if args.experts is None else args.experts,
    )
    _check_offload(options)
    reason = why_impossible(
        options.parallel,
        options.optimizer,
        options.config,
        options.world_size,
        options.mesh,
        offloads=options.offload is not None,
        clips=options.clip_grad_norm is not None,
    )
    if reason is not None:
        raise InputError(reason)
    if options.mesh is not None:
        _check_rows(options.mesh)
    return options


def make_run_dir(out: Path) -> Path:
    """A new folder ``out``/UTC time, and the proof that it can be written to.

    Raises:
        InputError: no permission, no space, or something in the way.
    """
    name = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H-%M-%SZ")
    try:
        out.mkdir(parents=True, exist_ok=True)
        for number in range(1, 1000):
            run_dir = out / (name if number == 1 else f"{name}-{number}")
            try:
                run_dir.mkdir()
            except FileExistsError:
                continue
            (run_dir / "train.jsonl").touch()
            return run_dir
    except OSError as error:
        raise InputError(
            f"--out {out}: cannot write there: {error.strerror}; choose another folder"
        ) from error
    raise InputError(f"--out {out}: a thousand runs began in this second")


def _start(options: Options, corpus: Corpus) -> Checkpoint:
    identity = options.identity(corpus.sha256)
    if options.resume is None:
        return Checkpoint(TrainState.fresh(options.config, options.seed), 0, 0.0, identity)
    start = load_checkpoint(options.resume, identity)
    over = start.step >= options.steps if options.steps else start.elapsed_s >= options.seconds
    if over:
        limit = f"--steps {options.steps}" if options.steps else f"--seconds {options.seconds:g}"
        raise InputError(
            f"--resume {options.resume}: it stands at step {start.step} after "
            f"{start.elapsed_s:.1f} s, so {limit} leaves nothing to do; give more"
        )
    return start


def _say_interrupted(run_dir: Path) -> None:
    if sys.stdout.isatty():
        print("\033[?25h", end="")  # the cursor, which a live line that was killed had hidden
    checkpoint = run_dir / FILE_NAME
    if checkpoint.exists():
        print(f"\ntrain: interrupted; go on with --resume {checkpoint}")
    else:
        print("\ntrain: interrupted before there was a checkpoint")


def _run(options: Options, corpus: Corpus, start: Checkpoint) -> int:
    launched_rank = os.environ.get("RANK")
    if launched_rank is not None:
        launch.prepare_rank_signals(launched=True)
        rank = int(launched_rank)
        run_dir = make_run_dir(options.out) if rank == 0 else None
        code = run_rank(options, corpus, start, rank, run_dir, None, run_phases)
        if run_dir is not None and code == launch.EXIT_INTERRUPTED:
            _say_interrupted(run_dir)
        return code
    run_dir = make_run_dir(options.out)
    with tempfile.TemporaryDirectory(prefix="train-") as folder:
        store = str(Path(folder) / "store")
        code = launch.run_ranks(
            options.world_size,
            lambda rank: run_rank(options, corpus, start, rank, run_dir, store, run_phases),
        )
    for leftover in run_dir.glob("*.tmp"):  # of a rank that was killed while it saved
        leftover.unlink()
    if code == launch.EXIT_INTERRUPTED:
        _say_interrupted(run_dir)
    if code == launch.EXIT_OK and options.why_no_race is None:
        return race(options, run_dir)
    return code


def main(argv: list[str]) -> int:
    """Runs the main job; returns the exit code (0 fine, 2 bad input, 3 a promise did not hold)."""
    torch.set_num_threads(1)  # of every rank, and before the fork, which threads would not survive
    try:
        options = read_options(argv)
        corpus = load_corpus(options.text, CONTEXT_BYTES)
        return _run(options, corpus, _start(options, corpus))
    except (InputError, CorpusError, CheckpointError) as error:
        print(f"train: {error}", file=sys.stderr)
        return launch.EXIT_BAD_INPUT
    except KeyboardInterrupt:
        return launch.EXIT_INTERRUPTED
