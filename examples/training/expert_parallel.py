"""Expert parallelism: the experts of each layer on several ranks, by ``ringcomm.nn``."""

from __future__ import annotations

from typing import Any

from ringcomm.nn import MixtureOfExperts
from training.mesh import Mesh
from training.model import TOP_K, Experts, Llama


def spread(model: Llama, mesh: Mesh) -> None:
    """Keeps this rank's experts of a whole model, which is the same on all ranks."""
    layers: Any = model.layers
    for layer in layers:
        if isinstance(layer.ffn, Experts):
            layer.ffn = MixtureOfExperts.from_experts(
                layer.ffn.router,
                list(layer.ffn.experts.values()),
                TOP_K,
                group=mesh.ep,
                replica_group=mesh.replicas,
            )
