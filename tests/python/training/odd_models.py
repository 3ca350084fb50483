"""Models and losses of public reports about sharded training, for test_odd_models.py."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from rows import Block, Blocks, square
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint


class Kept(Blocks):
    """Keeps an activation from within a unit."""

    def __init__(self) -> None:
        super().__init__()
        inner: Any = self.blocks[1].a
        inner.register_forward_hook(self.keep)

    def keep(self, *args: Any) -> None:
        self.kept = args[-1]


def loss_of_kept(model: Any, x: Tensor, _: Tensor) -> Tensor:
    model(x)
    return square(model.kept)


class WithLoss(Block):
    """The part of the loss that a block keeps has layers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.d = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x)
        self.loss = square(self.d(torch.tanh(self.c(x.detach()))))
        return y


def all_losses(model: Any, x: Tensor, _: Tensor) -> Tensor:
    return square(model(x)) + sum(block.loss for block in model.blocks)


class View(Block):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = super().forward(x).unsqueeze(0).squeeze(0)
        return y


class InPlaceAfter(Blocks):
    def forward(self, x: Tensor) -> Any:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            x += 1.0
        return self.last(x)


@dataclasses.dataclass
class State:
    x: Tensor
    extra: Any = None


class OfStates(Block):
    def forward(self, state: State) -> State:
        return State(super().forward(state.x), {"seen": [state.x.sum()]})


class StatesNet(Blocks):
    def forward(self, x: Tensor) -> State:
        state = State(self.first(x))
        for block in self.blocks:
            state = block(state)
        return State(self.last(state.x), state.extra)


def loss_of_state(model: Any, x: Tensor, _: Tensor) -> Tensor:
    state = model(x)
    loss: Tensor = square(state.x) + 0.1 * state.extra["seen"][0]
    return loss


class Appends(Block):
    """Hands its result on in a list that it was given."""

    def forward(self, values: list[Tensor]) -> None:
        values.append(super().forward(values[-1]))


class AppendsNet(Blocks):
    def forward(self, x: Tensor) -> Any:
        values = [self.first(x)]
        for block in self.blocks:
            block(values)
        return self.last(values[-1])


class Returns(Blocks):
    """Also a weight, or what `part` makes of the output and the weight."""

    def __init__(self, part: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.scale, self.part = nn.Parameter(torch.ones(3)), part

    def forward(self, x: Tensor) -> Any:
        return self.part(super().forward(x), self.scale)


def scaled_loss(model: Any, x: Tensor, _: Tensor) -> Tensor:
    out = model(x)
    y, scale = out if isinstance(out, tuple) else (out.x, out.extra)
    return square(y) * scale.sum()


class Embedded(Blocks):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 7, **options)

    def forward(self, x: Tensor) -> Any:
        ids = (x[:, :5].abs() * 3).long().clamp(max=9)
        return super().forward(self.embedding(ids))


class Alternates(Blocks):
    turn = 0

    def forward(self, x: Tensor) -> Any:
        return self.last(self.blocks[self.turn % 2](self.first(x)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells = nn.ModuleList([nn.GRUCell(7, 7), nn.GRUCell(7, 7)])

    def forward(self, x: Tensor) -> Tensor:
        states = [torch.zeros_like(x)] * 2
        for time in range(3):
            y = x * (time + 1)
            for i, cell in enumerate(self.cells):
                states[i] = y = cell(y, states[i])
        return states[-1]


class Checkpointed(Blocks):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        def blocks(y: Tensor) -> Any:
            for block in self.blocks:
                is_nested = self.kind == "nested"
                y = checkpoint(block, y, use_reentrant=False) if is_nested else block(y)
            return y

        x = checkpoint(blocks, self.first(x), use_reentrant=self.kind == "reentrant")
        return self.last(x)


class FrozenNorms(nn.Module):
    """Recomputed blocks: the first is frozen, and of the others the norms are."""

    def __init__(self, is_reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.LayerNorm(7), nn.Linear(7, 7)) for _ in range(3)]
        for frozen in (blocks[0], *(block[0] for block in blocks)):
            frozen.requires_grad_(False)
        self.blocks, self.is_reentrant = nn.ModuleList(blocks), is_reentrant
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Any:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.is_reentrant)
        return self.head(x)


def with_hooks() -> nn.Module:
    model = Blocks()
    for block in model.blocks:
        before: Any = lambda _, grads: tuple(2 * g for g in grads)  # noqa: E731
        after: Any = lambda _, grads, __: tuple(g / 3 for g in grads)  # noqa: E731
        block.register_full_backward_pre_hook(before)
        block.register_full_backward_hook(after)
    return model


def normalized() -> nn.Module:
    model: Any = Blocks()
    for block in model.blocks:
        parametrizations.weight_norm(block.a)
        prune.l1_unstructured(block.b, "weight", 0.5)
    parametrizations.orthogonal(model.first)
    return model


class Expanded(Block):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(1, 8))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x) * self.w.expand_as(x) + self.v.t().expand(8, len(x)).t()


class WithNothing(nn.Module):
    """A layer without outputs, a weight without dimensions, and one of one element."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.none = nn.Parameter(torch.zeros(0, 7))
        self.first, self.last = nn.Linear(7, 7), nn.Linear(7, 3)
        self.scale, self.one = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.ones(1, 1))

    def forward(self, x: Tensor) -> Any:
        x = torch.tanh(self.first(x)) * self.scale
        return self.last(x + nn.functional.linear(x, self.none).sum(-1, keepdim=True)) * self.one


class WithStored(nn.Module):
    """Frozen weights of 8 bits, which forward scales."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        stored = torch.randn(7, 7).to(torch.float8_e4m3fn), torch.arange(7).byte()
        self.floats, self.bytes = (nn.Parameter(x, requires_grad=False) for x in stored)
        self.last = nn.Linear(7, 3)
        self.dtypes: Any = ()

    def forward(self, x: Tensor) -> Any:
        self.dtypes = self.floats.dtype, self.bytes.dtype
        return self.last(x @ self.floats.to(x.dtype) + self.bytes.to(x.dtype) / 8)


# ---- losses


def two_forwards(model: Any, x: Tensor, _: Tensor) -> Tensor:
    a, b = model(x), model(x + 1)
    return square(a - b.detach()) + nn.functional.cosine_similarity(a, b).mean()


def teacher(model: Any, x: Tensor, _: Tensor) -> Tensor:
    student = model(x)
    with torch.no_grad():
        target = model(x + 1)
    return square(student - target)


def adversarial(model: Any, x: Tensor, _: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    (grad,) = torch.autograd.grad(square(model(x)), x)
    return square(model(x.detach() + 0.1 * grad.sign()))


def saved_on_host(model: Any, x: Tensor, _: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return square(model(x))


def with_anomaly_detection(model: Any, x: Tensor, _: Tensor) -> Tensor:
    with torch.autograd.detect_anomaly(check_nan=False):
        return square(model(x))


def in_one_tensor() -> nn.Module:
    """Weights that a user keeps in one flat tensor are ordinary weights."""
    torch.manual_seed(0)
    flat = torch.randn(7 * 5 + 5 * 3)
    model: Any = nn.Sequential(nn.Linear(7, 5, bias=False), nn.Linear(5, 3, bias=False))
    model[0].weight.data, model[1].weight.data = flat[:35].view(5, 7), flat[35:].view(3, 5)
    return model


class Copied(nn.Module):
    """A decoder whose weight is an encoder's by memory alone, or a part of it."""

    def __init__(self, is_part: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.encoder = nn.Linear(7, 7, bias=False)
        self.decoder = nn.Linear(7, 3 if is_part else 7, bias=False)
        own = self.encoder.weight.data
        self.decoder.weight.data = own[1:4] if is_part else own

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.decoder(self.encoder(x))
        return out


def with_buffer_in_a_weight(is_persistent: bool) -> Any:
    torch.manual_seed(0)
    model: Any = nn.Linear(7, 3)
    model.register_buffer("shown", model.weight.detach()[:1], persistent=is_persistent)
    model.register_buffer("also", model.shown, persistent=is_persistent)
    return model


class Parts(nn.Module):
    """Without a forward()."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(7, 8), nn.Tanh())
        self.last = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))


def layers() -> list[nn.Module]:
    return [nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 1)]


# What cannot be called, and how its parts are called.
CONTAINERS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Any]]] = {
    "list": (lambda: nn.ModuleList(layers()), list),
    "dict": (
        lambda: nn.ModuleDict({"a": nn.Sequential(*layers()[:2]), "b": layers()[2]}),
        lambda model: model.values(),
    ),
    "nested": (
        lambda: nn.ModuleList([nn.ModuleList(layers()[:2]), layers()[2]]),
        lambda model: [*model[0], model[1]],
    ),
    "no forward": (Parts, lambda model: [model.first, model.last]),
}


def container(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return CONTAINERS[kind][0]()


def by_parts(kind: str, model: nn.Module, x: Tensor, _: Tensor) -> Tensor:
    for part in CONTAINERS[kind][1](model):
        x = part(x)
    return square(x)


class Sharing(nn.Module):
    """The first two layers share a module; generate() calls a layer, and uses a weight of no layer.

    As generate() of transformers calls the encoder of an encoder-decoder model.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        norm = nn.LayerNorm(8)
        first = [nn.Sequential(nn.Linear(8, 8), norm), nn.Sequential(nn.Linear(8, 8), norm)]
        self.layers = nn.ModuleList([*first, nn.Linear(8, 8)])
        self.embed = nn.Embedding(6, 8)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.embed(ids)
        for layer in self.layers:
            out = out + layer(out)
        return out @ self.embed.weight.T

    @torch.no_grad()
    def generate(self, ids: Tensor, *, number: int) -> Tensor:
        start = self.layers[2](self.embed(ids)) @ self.embed.weight.T
        ids = torch.cat([ids, start[:, -1:].argmax(-1)], 1)
        for _ in range(number):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        return ids


class ByName(nn.Module):
    """Calls its layers' forward, as SqueezeBERT; models have the activation in common."""

    activation = nn.Tanh()

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.common = ByName.activation

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.common(layer.forward(x))
        return x
