"""Tensor parallelism for a model of transformers: every layer is sharded over the ranks.

torchrun --nproc-per-node 2 examples/tensor_parallel.py --sequence-parallel
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from common import Job, make_parser, run
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ringcomm.integrations.transformers import tensor_parallelize
from ringcomm.parallel import clip_grad_norm_, get_state_dict


def parser() -> argparse.ArgumentParser:
    """The options."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="also shard the activations between layers"
    )
    return parser


def make_model(hidden: int = 128, layers: int = 4) -> Any:
    """A small Llama of random parameters, the same on all ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    model: Any = LlamaForCausalLM(config)
    return model


def recompute_layers(model: Any) -> Any:
    """Makes the backward pass recompute layers from their saved inputs; returns the model."""
    for layer in model.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    return model


def main(options: argparse.Namespace) -> list[float]:
    """Trains; the losses."""
    job = Job(options)
    model = make_model().to(job.device)
    tensor_parallelize(model, sequence_parallel=options.sequence_parallel)
    num_params = sum(param.numel() for param in model.parameters())
    job.say(f"each rank has {num_params:,} parameters")
    optimizer = torch.optim.AdamW(model.parameters(), options.lr)

    def loss_of(ids: Tensor, _: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=ids, labels=ids).loss  # it shifts labels itself
        return loss

    for step in range(options.steps):
        loss = loss_of(*job.batch(step, 0, 1))  # the same rows on all ranks
        loss.backward()
        clip_grad_norm_(model, 1.0)  # by the norm of the whole model
        optimizer.step()
        optimizer.zero_grad()
        job.log(step, loss)

    whole, _ = get_state_dict(model, full=True, rank0_only=True)  # as save_pretrained() takes it
    job.say(f"the whole model: {sum(value.numel() for value in whole.values()):,} parameters")
    return job.finish(loss_of, 0, 1)


if __name__ == "__main__":
    run(main, parser())
