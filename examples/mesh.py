"""A model on a mesh: pipeline, data, tensor and expert parallelism, and ZeRO, in one call.

torchrun --nproc-per-node 8 examples/mesh.py --pp 2 --tp 2 --ep 2 --save runs/mesh
torchrun --nproc-per-node 4 examples/mesh.py --tp 2 --ep 2 --resume runs/mesh --steps 200
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from checkpoint import load, save
from common import Job, make_parser, run

from ringcomm.parallel import ParallelDims, parallelize


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    add("--dp", type=int, default=-1, help="replicas; -1: as many as there are ranks for")
    add("--fsdp", type=int, default=1, help="ranks that share the weights of a replica (ZeRO-3)")
    add("--pp", type=int, default=1, help="stages of the pipeline")
    add("--tp", type=int, default=1, help="ranks that share each layer")
    add("--ep", type=int, default=1, help="ranks that share the experts")
    add("--experts", type=int, default=4, help="of each layer; 0: a dense model")
    add(
        "--sequence-parallel", action="store_true", help="also shard the activations between layers"
    )
    add("--zero-stage", type=int, choices=(0, 1, 2, 3))
    add("--schedule", default="1f1b", help="of the pipeline")
    add("--micro-batches", type=int)
    add("--recompute", action="store_true", help="activation checkpointing of each layer")
    add("--save", type=Path, help="a folder for the checkpoint")
    add("--resume", type=Path, help="a folder with a checkpoint, of any mesh")
    return parser


def make_model(num_experts: int) -> Any:
    """A small Mixtral or Llama of random parameters, the same on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    if num_experts == 0:
        return LlamaForCausalLM(LlamaConfig(**sizes))
    return MixtralForCausalLM(
        MixtralConfig(num_local_experts=num_experts, sliding_window=None, **sizes)
    )


def main(options: argparse.Namespace) -> list[float]:
    """Trains; the losses."""
    job = Job(options)
    dims = ParallelDims(
        dp=options.dp,
        fsdp=options.fsdp,
        pp=options.pp,
        tp=options.tp,
        ep=options.ep,
        device_type=job.device.type,
    )
    job.say(str(dims))
    train = parallelize(
        make_model(options.experts).to(job.device),
        dims,
        lambda params: torch.optim.AdamW(params, options.lr),
        zero_stage=options.zero_stage,
        sequence_parallel=options.sequence_parallel,
        schedule=options.schedule,
        num_microbatches=options.micro_batches,
        recompute=options.recompute,
    )
    begin = load(options.resume, train, train.optimizer) if options.resume else 0
    place = dims["batch"].get_local_rank(), dims["batch"].size()  # whose rows these are
    for step in range(begin, options.steps):
        ids, _ = job.batch(step, *place)
        loss = train.step(ids, ids)
        train.clip_grad_norm_(1.0)
        train.optimizer.step()
        train.optimizer.zero_grad()
        job.log(step, loss)
    if options.save:
        save(options.save, options.steps, train, train.optimizer)
    return job.finish(lambda ids, _: train.evaluate(ids, ids), *place)


if __name__ == "__main__":
    run(main, parser())
