"""What a parameter server is to make, by recurrences in one process."""

from __future__ import annotations

import random
from typing import Any

from ps_runs import STEPS, groups_of, make_of
from torch import Tensor
from zero_models import Net, batch, loss_of, make_optimizer, weights


def train_alone(
    kind: str, num_micro_batches: int = 1, **model_options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """The same steps in one process, on all rows."""
    model = Net(**model_options)
    optimizer = make_optimizer(model, kind)
    losses = []
    for step in range(STEPS):
        for part in range(num_micro_batches):
            loss = loss_of(model, *batch(num_micro_batches * step + part))
            loss.backward()
            losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, weights(model)


def random_schedule(workers: list[int], num_pushes: int, seed: int) -> list[tuple[str, int]]:
    """Workers in any order; some pull twice, or push twice at the same weights."""
    draw = random.Random(seed)
    events = []
    for _ in range(num_pushes):
        worker = draw.choice(workers)
        events += [("pull", worker)] * draw.choice([0, 1, 1, 1, 2])
        events += [("push", worker)]
    return events + [("pull", worker) for worker in workers]


def recurrence(
    schedule: list[tuple[str, int]], workers: list[int]
) -> tuple[dict[str, Tensor], dict[int, int]]:
    """w <- w - lr g_k(w as worker k pulled it), one push after the other, in one process."""
    model = Net()
    optimizer = make_of("momentum")(groups_of(model))
    pulled = {worker: (0, weights(model)) for worker in workers}
    num_pushes = dict.fromkeys(workers, 0)
    version = 0
    histogram: dict[int, int] = {}
    for kind, worker in schedule:
        if kind == "pull":
            pulled[worker] = version, weights(model)
            continue
        at, values = pulled[worker]
        other = Net()
        other.load_state_dict(values)
        rows = batch(num_pushes[worker], workers.index(worker), len(workers))
        loss_of(other, *rows).backward()
        for param, source in zip(model.parameters(), other.parameters(), strict=True):
            param.grad = source.grad
        optimizer.step()
        num_pushes[worker] += 1
        histogram[version - at] = histogram.get(version - at, 0) + 1
        version += 1
    return weights(model), histogram
