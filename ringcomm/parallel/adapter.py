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
from ringcomm.parallel.model.describe import Model, unwrapped
from ringcomm.parallel.tensor.splits import SplitModule


class Adapter:
    """A model of transformers, perhaps in wrappers; or any other model, or a dict of blocks.

    Attributes:
        dims: the mesh.
        systems: that will split it, as parallel/model/refuse.py names them.
        is_split, has_experts: whether it has tensor-parallel layers, or sharded experts.
    """

    def __init__(
        self, model: Any, described: Model, dims: ParallelDims, loss_fn: Loss | None, **loss: Any
    ) -> None:
        """`loss_fn` is None for the loss in the model; `loss` are options of PartLoss."""
        self._given, self._model = model, unwrapped(described.module)
        self.dims, self._loss = dims, loss
        self._part_loss = None if loss_fn is None else PartLoss(loss_fn, **loss)
        kinds = {type(module) for module in described.module.modules()}
        self.is_split = any(issubclass(kind, SplitModule) for kind in kinds)
        self.has_experts = any(issubclass(kind, LocalExperts) for kind in kinds)
        self._stacked = [module for module in described.module.modules() if is_stacked(module)]
        self.systems = {"Pipeline"} if dims.pp > 1 else set[str]()
        self.systems |= {"tensor_parallelize"} if dims.tp > 1 and not self.is_split else set()
        self.systems |= {"expert_parallelize"} if dims.ep > 1 and self._stacked else set()

    def check(self, **options: Any) -> None:
        """Raises TypeError or ValueError for a mesh that cannot split the model, or a loss.

        Options are those of split().
        """
        name, dims, has_loss = type(self._given).__name__, self.dims, self._part_loss is None
        base = getattr(self._model, "base_model", None)
        config = getattr(base, "config", None)
        if hasattr(self._given, "get_base_model"):
            if dims.tp > 1 or dims.pp > 1:
                mesh = f"tp {dims.tp} and pp {dims.pp}"
                raise TypeError(f"{name} of PEFT has no plan for {mesh}: use dp or fsdp")
            peft_config = getattr(self._given, "active_peft_config", None)
            if has_loss and getattr(peft_config, "is_prompt_learning", False):
                why = "adds tokens, whose labels are unknown: pass loss_fn"
                raise TypeError(f"{name} of PEFT {why}")
        if has_loss and config is None:
            raise ValueError(f"{name} is not a model of transformers and has no loss: pass loss_fn")
        has_plan = bool(getattr(config, "base_model_tp_plan", None))
        if dims.tp > 1 and not (self.is_split or has_plan):
            raise TypeError(
                f"tp is {dims.tp}, but {name} has neither a tensor-parallel plan nor layers such as"
                " ringcomm.nn.ColumnParallelLinear"
            )
        if "tensor_parallelize" not in self.systems and any(options.values()) and dims.tp > 1:
            words = " and ".join(name for name, value in options.items() if value)
            raise ValueError(
                f"{words}: for layers that parallelize() splits, but those of {name} are split"
                " already, and have options of their own"
            )
        if dims.ep > 1 and not (self._stacked or self.has_experts):
            raise TypeError(
                f"ep is {dims.ep}, but {name} has neither stacked experts of transformers, such as"
                " Mixtral's and Qwen3-MoE's, nor layers of ringcomm.nn.MixtureOfExperts"
            )
        if dims.pp == 1 and isinstance(self._given, Mapping):
            raise TypeError("a dict of blocks is for a pipeline: use pp above 1, or give a model")
        if dims.pp > 1 and has_loss:
            self._check_blocks(name, base, config)
        elif dims.pp > 1 and not isinstance(self._given, nn.Sequential | nn.ModuleList | Mapping):
            raise TypeError(
                f"pp is {dims.pp}, but {name} is neither an nn.Sequential nor a dict of blocks; for"
                " a model of transformers, which has its own loss, leave loss_fn out"
            )

    def _check_blocks(self, name: str, base: Any, config: Any) -> None:
        """For a pipeline with the loss in the model."""
        plan = getattr(config, "base_model_pp_plan", None) or ()
        has_ends = "layers" in plan and all(hasattr(base, part) for part in plan)
        has_ends = has_ends and base is not self._model
        if not has_ends or self._model.get_output_embeddings() is None:
            raise TypeError(f"{name} has no pipeline plan of its modules in its config")
        # Layers of groups are not run here.
        is_plain = not (self.is_split or self.has_experts)
        if is_plain and (found := problem_of_blocks(self._model)):
            raise TypeError(f"{name} cannot be split into a sequence of blocks ({found}): use pp=1")
        if getattr(config, "output_router_logits", False):
            raise ValueError(
                "a pipeline does not compute the routers' loss: set output_router_logits to False,"
                " or use pp=1"
            )

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
