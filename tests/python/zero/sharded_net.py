"""A small model to shard, and how to train it by hand."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ringcomm.parallel import WeightShards

DIM = 130  # a matrix of a block is more than what travels packed
VOCAB = 11
LR = 0.1


class Block(nn.Module):
    """A frozen weight before a trainable one, and parameters of all sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter = nn.Linear(DIM, 3)
        self.frozen = nn.Linear(3, DIM).requires_grad_(False)
        self.up = nn.Linear(DIM, DIM)
        self.gain = nn.Parameter(torch.ones(()))
        self.nothing = nn.Parameter(torch.ones(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        low = self.adapter(x.to(self.adapter.weight.dtype))
        x = x + self.frozen(torch.tanh(low.float()))
        return x + self.gain * torch.tanh(self.up(x))


class Net(nn.Module):
    """A language model in small; `mode` says what is unusual about it."""

    def __init__(self, mode: str = "plain") -> None:
        super().__init__()
        self.mode = mode
        self.embed = nn.Embedding(VOCAB, DIM)
        nn.init.normal_(self.embed.weight, std=0.1)  # losses near 1, tied as well: 1e-6 is some ulp
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.register_buffer("scale", torch.full((1,), 0.5))
        if mode == "tied":
            self.head.weight = self.embed.weight
        if mode == "shared layer":
            self.blocks.append(self.blocks[0])
        if mode == "shared weight":
            self.blocks[2].up = self.blocks[1].up

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            if self.mode == "unused" and i == 1:
                continue
            is_again = self.mode == "reentrant"
            x = checkpoint(block, x, use_reentrant=True) if is_again else block(x)
        if self.mode == "checkpointed head":
            return checkpoint(lambda h: self.head(self.norm(h)), x, use_reentrant=False)
        return self.head(self.norm(x)) * self.scale


def make(mode: str = "plain") -> Net:
    torch.manual_seed(3)
    net = Net(mode)
    if mode == "mixed":  # dtypes within a unit
        for block in net.blocks:
            block.adapter.to(torch.bfloat16)
    return net


def loss_of(net: nn.Module, step: int, share: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + share)
    ids = torch.randint(VOCAB, (2, 5), generator=generator).to(next(net.buffers()).device)
    return nn.functional.cross_entropy(net(ids).flatten(0, 1).float(), ids.roll(1).flatten())


def trainable(net: nn.Module) -> list[nn.Parameter]:
    return [param for param in net.parameters() if param.requires_grad]


def descend(weight: Tensor, grad: Tensor) -> None:
    """One operation after the other: torch's add_ of bfloat16 rounds by where an element stands."""
    weight.detach().copy_(weight.detach().float() - grad.float() * LR)


def sgd(shards: WeightShards, net: nn.Module) -> None:
    for param in trainable(net):
        if param.grad is not None:
            grad = shards.reduce_scatter(param, param.grad)
            descend(shards.shard_of(param), grad)
            param.grad = None
    shards.release_all()


def assert_near(actual: dict[str, Tensor], expected: dict[str, Tensor], atol: float) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(actual[name].cpu(), value.cpu(), rtol=0, atol=atol, msg=name)


def live_bytes(net: nn.Module) -> int:
    storages = {p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in net.parameters()}
    return sum(storages.values())
