"""A model of Megatron-core's tensor-parallel layers on CPUs: what megatron_*.py share.

Megatron-core is for GPUs: "cpu" takes the place of the current CUDA device, for both backends.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import (
    _allreduce_non_tensor_model_parallel_grads as sum_grads_of_norms,
)
from megatron.core.transformer import TransformerConfig
from torch import nn

NUM_CLASSES, WIDTH, TOKENS, ROWS, STEPS = 128, 64, 16, 4, 12

vars(torch.cuda)["current_device"] = lambda: "cpu"


class Block(nn.Module):
    """A norm, and two linear layers that are split by columns and by rows."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        options: dict[str, Any] = {"config": config, "init_method": config.init_method}
        self.norm = nn.LayerNorm(WIDTH)
        for param in self.norm.parameters():
            vars(param)["sequence_parallel"] = config.sequence_parallel
        self.wide = tensor_parallel.ColumnParallelLinear(WIDTH, 4 * WIDTH, bias=True, **options)
        self.narrow = tensor_parallel.RowParallelLinear(
            *(4 * WIDTH, WIDTH),
            **options,
            bias=True,
            input_is_parallel=True,
            skip_bias_add=False,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide, _ = self.wide(self.norm(x))
        return x + self.narrow(nn.functional.gelu(wide))[0]


class Model(nn.Module):
    """An embedding split by its vocabulary, blocks, and logits split by classes."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        options: dict[str, Any] = {"config": config, "init_method": config.init_method}
        self.embedding = tensor_parallel.VocabParallelEmbedding(
            NUM_CLASSES, WIDTH, reduce_scatter_embeddings=config.sequence_parallel, **options
        )
        self.blocks = nn.Sequential(*(Block(config) for _ in range(2)))
        self.head = tensor_parallel.ColumnParallelLinear(WIDTH, NUM_CLASSES, bias=False, **options)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        embedded = self.embedding(tokens)
        if not self.head.config.sequence_parallel:
            embedded = embedded.transpose(0, 1)  # tokens first, as the reduce_scatter leaves them
        logits, _ = self.head(self.blocks(embedded))
        return tensor_parallel.vocab_parallel_cross_entropy(logits, targets).mean()


def train(is_sequence_parallel: bool) -> dict[str, list[float]]:
    """Losses of tensor parallelism over 2 ranks; other ranks have other rows."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=WIDTH,
        num_attention_heads=4,
        tensor_model_parallel_size=2,
        sequence_parallel=is_sequence_parallel,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
    )
    torch.manual_seed(0)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), Model(config))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    data_group = parallel_state.get_data_parallel_group()
    draw = torch.Generator().manual_seed(parallel_state.get_data_parallel_rank())
    losses = []
    for _ in range(STEPS):
        start = torch.randint(NUM_CLASSES, (ROWS, 1), generator=draw)
        tokens = (start + 3 * torch.arange(TOKENS + 1)) % NUM_CLASSES
        model.zero_grad_buffer()
        loss = model(tokens[:, :-1], tokens[:, 1:].t().contiguous())
        loss.backward()
        model.finish_grad_sync()
        sum_grads_of_norms([model], config)
        for param in model.parameters():
            param.grad = param.main_grad
        optimizer.step()
        mean = loss.detach() / data_group.size()
        dist.all_reduce(mean, group=data_group)
        losses.append(float(mean))
    sums = [float(param.detach().double().sum()) for param in model.parameters()]
    parallel_state.destroy_model_parallel()
    return {"losses": losses, "sums of weights": sums}


def train_all() -> dict[str, list[float]]:
    """Series without and with sequence parallelism."""
    dist.init_process_group("gloo")
    found = {}
    for name, is_sequence_parallel in (("plain", False), ("sequence parallel", True)):
        for series, values in train(is_sequence_parallel).items():
            found[f"{name}: {series}"] = values
    return found
