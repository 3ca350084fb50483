"""Models for pipelines, and one process that runs their micro-batches one after the other."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from curves import Block, Run, batch, make_model, sgd
from steps import apply_steps
from torch import Tensor, nn

M = 8  # micro-batches
STEPS = 3
VOCAB, WIDTH, SEQ, ROWS = 11, 8, 3, 16
CLIP_NORM = 0.5

mse = nn.functional.mse_loss


class Case(NamedTuple):
    """A training by a pipeline."""

    schedule: str
    num_ranks: int
    model: str = "deep"  # "frozen", "tied", "twice", or of BLOCKS
    stages_per_rank: int | None = None
    recompute: bool = False
    autocast: bool = False
    is_sum: bool = False  # the loss
    num_batches: int = 1  # a step
    scale: float = 1.0
    clips: bool = False
    evaluates: bool = False  # before the first step

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.model == "tied":
            return tokens_loss(output, target)
        return (output - target).square().sum() if self.is_sum else mse(output, target)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        return token_batch(number) if self.model == "tied" else batch(number)

    def make(self) -> Any:
        if self.model == "tied":
            return make_tied()
        if self.model in BLOCKS:
            torch.manual_seed(0)
            return Blocks(*BLOCKS[self.model](), nn.Linear(WIDTH, 3))
        model = make_deep()
        if self.model == "twice":
            layers = (Twice(b.up.in_features) if isinstance(b, Block) else b for b in model)
            return nn.Sequential(*layers)
        if self.model == "frozen":
            for block in list(model)[:3]:
                block.requires_grad_(False)
        return model

    @property
    def costs(self) -> list[int] | None:
        """Of frozen blocks: the first stage has no other ones, and the second has one."""
        return [3, 3, 1, 1, 1, 1, 1, 1, 1] if self.model == "frozen" else None


def alone(case: Case) -> tuple[Run, list[float]]:
    """One process: losses, weights, and norms."""
    model = case.make()
    optimizer = sgd([p for p in model.parameters() if p.requires_grad])
    losses, norms = [], []
    for step in range(STEPS):
        for part in range(case.num_batches):
            rows = case.batch(case.num_batches * step + part)
            divisor = 1 if case.is_sum else M
            found = []
            for x, y in zip(*(tensor.chunk(M) for tensor in rows), strict=True):
                with torch.autocast("cpu", enabled=case.autocast):
                    loss = case.loss(model(x), y)
                (loss / divisor * case.scale).backward()
                found.append(loss.detach())
            losses.append(float(torch.stack(found).float().sum() / divisor))
        if case.clips:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)))
        apply_steps(optimizer)
    return Run(losses, {k: v.clone() for k, v in model.state_dict().items()}), norms


def make_deep() -> nn.Sequential:
    """Nine blocks."""
    return make_model(8)


class Twice(nn.Module):
    """A weight for two layers; with a residual torch 2.13 raises in halves of the backward."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.both = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Any:
        return self.both(torch.tanh(self.both(x)))


class Blocks(nn.Sequential):
    """Blocks that take what the one before them returns, and may return several tensors."""

    def forward(self, value: Any) -> Any:
        for block in self:
            value = block(*value) if isinstance(value, tuple) else block(value)
        return value


class Around(nn.Module):
    """A weight before and after another one, which is beside it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.outer(self.inner(self.outer(x).tanh()).tanh())
        return y + self.inner(x)


class Pair(nn.Module):
    """Returns a second tensor that the next block does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, _: Tensor | None = None) -> Any:
        y = self.linear(x).tanh()
        return y, y * 2


class Drops(nn.Module):
    """The second tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, _: Tensor) -> Any:
        return self.linear(x).tanh()


class Writes(nn.Linear):
    """Writes into its input: a leaf of a stage, which in one process it is not."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.relu_())


BLOCKS: dict[str, Any] = {
    "shared": lambda: [Around() for _ in range(4)],
    "unused": lambda: [*(Pair() for _ in range(4)), Drops()],
    "in place": lambda: [nn.Linear(WIDTH, WIDTH), *(Writes(WIDTH, WIDTH) for _ in range(4))],
}


class Tied(nn.Module):
    """A language model whose head has the embedding's weight; blocks have dots in their names."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(6))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def blocks(self) -> dict[str, nn.Module]:
        layers = {f"layers.{i}": layer for i, layer in enumerate(self.layers)}
        return {"embed": self.embed, **layers, "norm": self.norm, "head": self.head}

    def forward(self, tokens: Tensor) -> Tensor:
        x = tokens
        for block in self.blocks().values():
            x = block(x)
        return x


def make_tied() -> Tied:
    torch.manual_seed(2)
    return Tied()


def token_batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCAB, (ROWS, SEQ + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def tokens_loss(logits: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
