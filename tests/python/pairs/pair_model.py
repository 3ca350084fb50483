"""The model of the tables of pairs, its batches, and its training in one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

WORLD_SIZE = 2
STEPS = 4
CLIP_NORM = 0.5
CLIP_VALUE = 0.02
SCALE = 1024.0
OVERFLOW_STEP = 1  # where losses are scaled dynamically
VOCABULARY, HIDDEN, ROWS = 11, 6, 8
INNER = 11  # uneven over 2 and 4 ranks, and with a part for each
# Which weights of the middle block have a gradient: see _use().
GRADIENTS = (
    "all",
    "none on rank 1",
    "none on any rank",
    "none in the first micro-batch",
    "layer skipped on rank 1",
)
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "bfloat16 weights": torch.bfloat16,
}
# Of the change of all weights, as a share of its norm. A lost micro-batch or rank is 0.1 and more.
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}


class Block(nn.Module):
    """A residual layer with an adapter that a batch may do without."""

    def __init__(self, has_experts: bool) -> None:
        super().__init__()
        self.mixture: nn.Module | None = Mixture() if has_experts else None
        self.norm = nn.LayerNorm(HIDDEN)
        self.up = nn.Linear(HIDDEN, INNER)
        self.down = nn.Linear(INNER, HIDDEN)
        self.adapter = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Tensor, with_adapter: bool = True) -> Tensor:
        hidden = self.norm(x)
        if with_adapter:
            hidden = hidden + self.adapter(hidden)
        out: Tensor = x + self.down(torch.tanh(self.up(hidden)))
        return out if self.mixture is None else out + self.mixture(hidden)


class Mixture(nn.Module):
    """Three experts of which each token goes through two."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(HIDDEN, 3, bias=False)
        self.experts = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chances = self.router(x).float().softmax(-1)
        weights, chosen = chances.topk(2)
        kept = torch.zeros_like(chances).scatter(-1, chosen, weights)
        parts = [kept[:, i, None] * each(x) for i, each in enumerate(self.experts)]
        return torch.stack(parts).sum(0).to(x.dtype)


def keep_products() -> Any:
    """Selective recomputation: matrix products are kept."""
    products = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    return create_selective_checkpoint_contexts(products)


class Net(nn.Module):
    """A language model of one token; sizes that no number of ranks divides."""

    def __init__(
        self, weights: str = "plain", recompute: str = "no", has_experts: bool = False
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block(has_experts) for _ in range(3))
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        if weights == "tied":
            self.head.weight = self.embedding.weight
        if weights == "frozen":
            self.blocks[0].up.requires_grad_(False)
            self.norm.weight.requires_grad_(False)
        self.recompute, self.is_selective = recompute, True

    def forward(self, ids: Tensor, use: Use) -> Tensor:
        x = self.embedding(ids)
        for i, block in enumerate(self.blocks):
            if i == 1 and not use.middle_block:
                continue
            with_adapter = use.adapters or i != 1
            if self.recompute == "no":
                x = block(x, with_adapter)
            elif self.recompute == "reentrant":
                x = checkpoint(block, x, with_adapter, use_reentrant=True)
            else:
                is_selective = self.is_selective and i == 2
                more: Any = {"context_fn": keep_products} if is_selective else {}
                x = checkpoint(block, x, with_adapter, use_reentrant=False, **more)
        logits: Tensor = self.head(self.norm(x))
        return logits


@dataclasses.dataclass(frozen=True)
class Use:
    """What a batch uses of the middle block."""

    adapters: bool = True
    middle_block: bool = True


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """Rows of one rank; `factor` makes the loss infinite where a step is to overflow."""

    ids: Tensor
    targets: Tensor
    use: Use
    factor: float

    def loss(self, model: nn.Module) -> Tensor:
        logits = model(self.ids, self.use)
        return nn.functional.cross_entropy(logits.float(), self.targets) * self.factor


def micro_batches(case: dict[str, str], step: int, rank: int) -> Iterator[MicroBatch]:
    """A rank's micro-batches of a step."""
    num_parts = int(case["accumulation"][0])
    overflows = case["loss scale"] not in ("none", "fixed") and step == OVERFLOW_STEP and rank == 1
    for part in range(num_parts):
        generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
        ids, targets = (torch.randint(VOCABULARY, (ROWS,), generator=generator) for _ in range(2))
        is_last = part == num_parts - 1
        yield MicroBatch(
            ids,
            targets,
            _use(case.get("gradients", "all"), step, rank, part),
            torch.inf if overflows and is_last else 1.0,
        )


def _use(gradients: str, step: int, rank: int, part: int) -> Use:
    match gradients:
        case "none on rank 1":
            return Use(adapters=rank == 0 or step == 2)
        case "none on any rank":
            return Use(adapters=step == 2)
        case "none in the first micro-batch":
            return Use(adapters=part > 0)
        case "layer skipped on rank 1":
            return Use(middle_block=rank == 0 or step == 2)
    return Use()


def params_in_groups(model: nn.Module, groups: str) -> list[dict[str, Any]]:
    """Parameter groups of what is trained."""
    params = [param for param in model.parameters() if param.requires_grad]
    if groups == "one":
        return [{"params": params}]
    decayed = {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1}
    others = {"params": [param for param in params if param.dim() <= 1], "weight_decay": 0.0}
    return [decayed, others] if groups == "decay first" else [others, decayed]


def train_alone(
    case: dict[str, str], make_optimizer: Any, num_ranks: int = WORLD_SIZE
) -> dict[str, Tensor]:
    """The same steps in one process, whose masters and sums are float32."""
    dtype = DTYPES[case["dtype"]]
    has_experts = "experts" in case.get("mesh", "")
    masters = Net(case["weights"], has_experts=has_experts)
    if case["dtype"].endswith("weights"):
        masters.to(dtype).float()
    optimizer = make_optimizer(params_in_groups(masters, case["groups"]))
    scale = {"none": 1.0, "dynamic": 2.0**16}.get(case["loss scale"], SCALE)
    for step in range(STEPS):
        sums: dict[str, Tensor] = {}
        for rank in range(num_ranks):
            for batch in micro_batches(case, step, rank):
                model = Net(case["weights"], has_experts=has_experts).to(dtype)
                model.load_state_dict(masters.state_dict())
                (batch.loss(model) * scale).backward()
                for name, param in model.named_parameters():
                    if param.grad is not None:
                        grad = param.grad.float() / (scale * num_ranks)
                        sums[name] = sums.get(name, torch.zeros_like(grad)) + grad
        is_good = all(bool(total.isfinite().all()) for total in sums.values())
        if not is_good and case["loss scale"] == "dynamic":
            scale /= 2
        for name, param in masters.named_parameters():
            param.grad = sums.get(name) if is_good else None
        trained = [param for param in masters.parameters() if param.grad is not None]
        if trained and case["clipping"] == "value":
            nn.utils.clip_grad_value_(trained, CLIP_VALUE)
        elif trained and case["clipping"] != "none":
            nn.utils.clip_grad_norm_(trained, CLIP_NORM)
        if is_good:
            optimizer.step()
        if _rounds_weights(case):
            masters.to(dtype).float()  # in place
        optimizer.zero_grad()
    return {name: param.detach() for name, param in masters.named_parameters()}


def _rounds_weights(case: dict[str, str]) -> bool:
    """Whether 16-bit weights are all there is: no masters."""
    is_trained_by_torch = not case.get("trained by", "zero").startswith("zero")
    return case.get("rounding") == "nearest" or is_trained_by_torch


def initial(case: dict[str, str]) -> dict[str, Tensor]:
    """The weights before the first step."""
    model = Net(case["weights"], has_experts="experts" in case.get("mesh", ""))
    if case["dtype"].endswith("weights"):
        model.to(DTYPES[case["dtype"]])
    return {name: param.detach().float() for name, param in model.named_parameters()}


def local_of(tensor: Tensor) -> Tensor:
    """What this rank holds of a weight."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def error_of(
    found: dict[str, Tensor], expected: dict[str, Tensor], start: dict[str, Tensor]
) -> float:
    """How far changes of weights are from those expected, as a share of the norm of these."""
    wrong = sum(
        float((found[name].float() - value).square().sum()) for name, value in expected.items()
    )
    moved = sum(float((start[name] - value).square().sum()) for name, value in expected.items())
    return (wrong / moved) ** 0.5


def tolerance(case: dict[str, str]) -> float:
    """Of error_of()."""
    if case.get("rounding") == "stochastic":
        return 0.3
    if case["dtype"] == "bfloat16 weights" and _rounds_weights(case):
        return 0.1  # so are sums of gradients, and states
    if "weights in" in case and case["dtype"] == "bfloat16 weights" and case["accumulation"] != "1":
        return 4e-2  # LOMO adds micro-batches up in 16 bits
    return TOLERANCES[DTYPES[case["dtype"]]]
