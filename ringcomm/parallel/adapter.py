"""A model as parallelize() uses it: wrappers, plans, experts and the loss are looked up once."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ringcomm.integrations.transformers import expert_parallelize, tensor_parallelize
from ringcomm.integrations.transformers.experts import is_stacked
from ringcomm.integrations.transformers.pipeline import pipeline_blocks, problem_of_blocks
from ringcomm.integrations.transformers.training import LossInModel
from ringcomm.parallel.expert.local_experts import LocalExperts
from ringcomm.parallel.loss import Loss, PartLoss
from ringcomm.parallel.mesh import ParallelDims
from ringcomm.parallel.model.describe import Model
from ringcomm.parallel.tensor.splits import SplitModule


class Adapter:
    """A model of transformers, perhaps in wrappers; or any other model, or a dict of blocks.

    Attributes:
        dims: the mesh.
        systems: that will split it, as parallel/model/refuse.py names them, and its axes.
        name: of its class, for messages.
        has_loss: whether its own loss is asked for.
        is_row: whether it is a sequence of blocks itself.
        is_split, has_experts: whether it has tensor-parallel layers, or sharded experts.
        has_stacked: whether it has experts for expert_parallelize().
        config: of a model of transformers; None for others.
        has_tensor_plan, has_pipeline_plan, has_router_loss: what that config says.
        is_peft, adds_tokens: whether PEFT has changed it, and puts learned tokens before a batch's.
    """

    def __init__(
        self, model: Any, described: Model, dims: ParallelDims, loss_fn: Loss | None, **loss: Any
    ) -> None:
        """`loss_fn` is None for the loss in the model; `loss` are options of PartLoss."""
        self._given, self._model = model, described.unwrapped
        self.dims, self._loss = dims, loss
        self._part_loss = None if loss_fn is None else PartLoss(loss_fn, **loss)
        self.name, self.has_loss = type(model).__name__, loss_fn is None
        self.is_row = isinstance(model, nn.Sequential | nn.ModuleList | Mapping)
        kinds = {type(module) for module in described.module.modules()}
        self.is_split = any(issubclass(kind, SplitModule) for kind in kinds)
        self.has_experts = any(issubclass(kind, LocalExperts) for kind in kinds)
        self._stacked = [module for module in described.module.modules() if is_stacked(module)]
        self.has_stacked = bool(self._stacked)
        self.systems = {axis for axis in ("tp", "pp", "ep") if getattr(dims, axis) > 1}
        self.systems |= {"Pipeline"} if dims.pp > 1 else set()
        self.systems |= {"tensor_parallelize"} if dims.tp > 1 and not self.is_split else set()
        self.systems |= {"expert_parallelize"} if dims.ep > 1 and self.has_stacked else set()
        base = getattr(self._model, "base_model", None)
        self.config = getattr(base, "config", None)
        self.has_tensor_plan = bool(getattr(self.config, "base_model_tp_plan", None))
        plan = getattr(self.config, "base_model_pp_plan", None) or ()
        has_ends = "layers" in plan and all(hasattr(base, name) for name in plan)
        has_ends = has_ends and base is not self._model
        self.has_pipeline_plan = has_ends and self._model.get_output_embeddings() is not None
        self.has_router_loss = bool(getattr(self.config, "output_router_logits", False))
        self.is_peft = hasattr(model, "get_base_model")
        peft_config = getattr(model, "active_peft_config", None)
        self.adds_tokens = getattr(peft_config, "is_prompt_learning", False)

    def problem_of_blocks(self) -> str:
        """Why a pipeline cannot run the model, or ""; layers of groups are not run here."""
        if not self.has_loss or self.is_split or self.has_experts:
            return ""
        return problem_of_blocks(self._model)

    def check_loss(self) -> str:
        """What the loss is; TypeError if the losses of parts of a batch cannot be weighted."""
        loss = self._part_loss or LossInModel(self._model, **self._loss)
        if loss.problem:
            raise TypeError(loss.problem)
        return loss.shown

    def to_split(self) -> set[nn.Parameter]:
        """The weights of which split() may leave parts on each rank."""
        if "tensor_parallelize" in self.systems:
            return {*self._model.parameters()}
        stacked = self._stacked if "expert_parallelize" in self.systems else ()
        return {param for module in stacked for param in module.parameters()}

    def split(self, **options: Any) -> PartLoss:
        """Splits experts, layers and for a pipeline blocks, and returns the loss.

        Options are those of tensor_parallelize(). What is split already stays. Collective.
        """
        dims = self.dims
        if "expert_parallelize" in self.systems:
            replicas = dims.group("edp") if dims["edp"].size() > 1 else None
            expert_parallelize(self._model, group=dims.group("ep"), replica_group=replicas)
        if "tensor_parallelize" in self.systems:
            tensor_parallelize(self._model, dims.group("tp"), **options)
        if self._part_loss is not None:
            self._part_loss.blocks = self._given if dims.pp > 1 else None
            return self._part_loss
        blocks = pipeline_blocks(self._model) if dims.pp > 1 else None
        return LossInModel(self._model, dims.group("tp"), blocks, **self._loss)
