"""LOMO: SGD whose gradients are consumed while the backward pass makes them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ringcomm.optim.gradients import EmbeddingGradient, Gradient, LinearGradient
from ringcomm.optim.in_backward import InBackwardOptimizer
from ringcomm.optim.slot import Slot
from ringcomm.optim.step_options import StepArguments, StepOptions
from ringcomm.optim.turns import Replicas

_ops: Any = torch.ops.ringcomm


class Lomo(InBackwardOptimizer):
    """W <- (1 - lr * weight_decay) * W - lr * G, inside the backward pass (Lv et al. 2023).

    A real torch.optim.Optimizer for the ordinary loop: forward, loss.backward(), step(),
    zero_grad(), schedulers, closures, state_dict. By default the weights are new when backward()
    returns, and no more than one gradient has existed at a time; those of nn.Linear and
    nn.Embedding never do, where the model is given and no ranks share the work. step() then only
    counts. The learning rate is that of the moment of the backward pass.

        opt = ringcomm.optim.Lomo(model, lr=1e-3)
        for batch in batches:
            model(batch).loss.backward()
            opt.step()
            opt.zero_grad()

    What must be known of the whole step before it is made costs memory or time:

    - clip_mode="deferred" holds gradients until step(); of a layer (input, output's gradient) where
      that is smaller. In time next to nothing, in memory at most all gradients.
    - clip_mode="two_pass" wants `opt.backward(loss)`, which runs the backward pass twice, first for
      the norm alone. LOMO's memory, a second backward (and recomputation), never a second forward.
      Checkpoints of use_reentrant=False keep one recomputed segment more meanwhile.

    Args:
        model_or_params: a model, of which all that requires grad is trained; or parameters, or
            torch.optim's parameter groups.
        lr: the learning rate, positive.
        weight_decay: decoupled; of an embedding's table, too, it decays all rows.
        model: beside parameters or groups, the model they are in: for fusion and for names.
        clip_grad_norm: multiply all gradients by min(1, clip_grad_norm / norm), the norm over
            gradients of all ranks, as torch.nn.utils.clip_grad_norm_.
        clip_grad_value: clamp each element to +-clip_grad_value instead.
        clip_mode: "deferred" (the default) or "two_pass"; also for a loss scale with a veto.
        max_held_bytes: the limit of what a deferred step holds; more is a RuntimeError before a
            weight is written. None for no limit.
        loss_scale: a factor for float16, or "dynamic": from 2**16, halved on overflow, doubled
            after 2000 good steps. The loop then is opt.scale(loss).backward().
        overflow: what Inf or NaN in a scaled gradient does. "veto" (the default): no weight and no
            state changes on any rank; costs what clip_mode says. "skip_layer": the weights that
            have it are left out, in the backward pass.
        accumulation_steps: micro-batches per step(). Their gradients are kept, and added in
            `reduce_dtype`, until the last one's are consumed: all gradients' memory.
        reduce_dtype: what gradients are accumulated and reduced in. Default: float32. The dtype of
            16-bit weights halves the memory of accumulated gradients, and the bytes of reductions.
            Weights of fully_shard are reduced in what its MixedPrecisionPolicy says.
        group: ranks with replicas: gradients are averaged over it inside the backward pass, one by
            one. Replicas stay equal to the last bit. A weight without a gradient on some ranks
            counts as zeros there; without one on all ranks it is left alone. Not for weights of
            fully_shard or ringcomm.parallel.WeightShards, whose gradients are reduced to their
            owner's shard. In a job of several ranks replicated weights need a group, such as
            dist.group.WORLD; "none" has this rank train a model of its own.
        overlap: let the backward pass go on while a gradient is reduced; it then lives until its
            sum is there, two of the largest at most. None: where the ranks are not on CPUs.
        splits: plain weights of which this rank holds one of several parts (tensor parallelism),
            with how; norms count every part once. DTensors say it themselves.
        stochastic_rounding: round bfloat16 weights up or down by chance, on average right, so that
            small updates are not lost; no memory.
        master: "split" keeps what bfloat16 weights lack of fp32 in 2 more bytes a weight, exactly.
        seed: of stochastic rounding; 32 bits.

    Raises:
        ValueError: an argument is out of range or excludes another, a parameter is none of the
            model, has an optimizer of this kind already, or does not require grad, the model makes
            sparse gradients, or is a DistributedDataParallel; reduce_dtype is neither float32 nor
            the dtype of every weight; in a job of several ranks there is no group= for replicated
            weights, or no model.

    In the model's forward pass, before a weight is written:

    - ValueError: a DistributedDataParallel is around a weight, or a weight was replaced or sharded
      since the optimizer was made.

    In the backward pass:

    - RuntimeError before a weight is written: the first gradient is not finite and there is no loss
      scale, the loss was not scaled, or clip_mode="two_pass" and not opt.backward().
    - RuntimeError before that weight is written: it has been updated in this step already.
    - RuntimeError on all ranks before a weight is written: a weight of WeightShards or fully_shard
      gets a gradient on some ranks only.
    - ValueError: the learning rate has become negative or NaN; or, of an optimizer made before
      init_process_group(), as the constructor.

    Parameters without a gradient are left alone, as in torch.optim. Between the use of a gradient
    and step() a parameter's .grad is a stand-in that raises RuntimeError when read:
    torch.nn.utils.clip_grad_norm_ and torch.amp.GradScaler would find nothing. A GradScaler raises
    at its step(), when the backward pass has written weights by the scaled gradients: use
    loss_scale=. With Trainer and Accelerate call prepare() of ringcomm.integrations.transformers or
    ringcomm.integrations.accelerate. Under torch.compile all gradients are made as tensors, and
    clip_mode="two_pass" wants torch._functorch.config.donated_buffer = False, or raises.
    """

    def __init__(
        self,
        model_or_params: nn.Module | Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.0,
        *,
        model: nn.Module | None = None,
        **options: Unpack[StepArguments],
    ) -> None:
        if not lr > 0:
            raise ValueError(f"lr is a positive number, got {lr!r}")
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay is 0 or more, got {weight_decay!r}")
        defaults = {"lr": lr, "weight_decay": weight_decay}
        super().__init__(model_or_params, model, defaults, StepOptions(**options))

    def _new_state(self, slot: Slot) -> dict[str, Tensor]:
        return self._new_low(slot)

    def update(self, slot: Slot, gradient: Gradient, factor: float) -> None:
        """See gradient_path.Updater."""
        decay = self._group_of(slot)["weight_decay"]
        scalars = (self._lr_of(slot), decay, factor, self._rounding_seed(slot))
        low, clip_value = self.state[slot.param].get("low"), self.options.clip_grad_value
        weight = slot.local
        if isinstance(gradient, LinearGradient):
            _ops.linear_sgd_update_(
                weight, gradient.x, gradient.grad_out, *scalars, low=low, clip_value=clip_value
            )
        elif isinstance(gradient, EmbeddingGradient):
            _ops.embedding_sgd_update_(
                weight,
                gradient.indices,
                gradient.grad_out,
                *scalars,
                low=low,
                clip_value=clip_value,
                padding_idx=gradient.padding_idx,
            )
        else:
            _ops.sgd_update_(
                weight,
                gradient.dense(),
                *scalars,
                low=low,
                clip_value=clip_value,
                first_elem=slot.layout.first_elem,
            )

    def update_replicas(self, replicas: Replicas, slot: Slot, grad: Tensor, factor: float) -> bool:
        """By the operator that reduces, updates and gathers, on CPUs: half of the passes."""
        options, weight = self.options, slot.local
        if (
            replicas.one_pass_name is None
            or options.stochastic_rounding
            or options.master is not None
            or weight.device.type != "cpu"
            or not weight.is_contiguous()
        ):
            return False
        group = self._group_of(slot)
        _ops.reduce_scatter_update_all_gather_.lomo(
            weight,
            grad.contiguous(),
            replicas.one_pass_name,
            lr=float(group["lr"]),
            weight_decay=group["weight_decay"],
            clip_value=options.clip_grad_value,
            average=True,
            grad_scale=factor,
        )
        return True
