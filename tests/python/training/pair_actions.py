"""What a user does around the steps of an engine, and what is seen of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from pair_batches import ACTION_STEP, STEPS, probe
from pair_engines import USERS_ERROR, dims_of
from pair_loops import LOOPS
from pair_models import NUM_CLASSES, is_small, unwrapped
from pair_oracle import Alone
from pair_table import Case
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel


def action_of(case: Case) -> str:
    default = "save and load" if case.get("resume", "no") != "no" else "none"
    return case.get("between steps", default)


def turns(case: Case) -> list[range]:
    """The steps of a case; those that a loop of others makes in one call are together."""
    if case.get("around") not in LOOPS:
        return [range(step, step + 1) for step in range(STEPS)]
    if action_of(case) == "none":
        return [range(STEPS)]
    return [range(ACTION_STEP), range(ACTION_STEP, STEPS)]


class Actions:
    """Those of a case around an engine, which one of them replaces."""

    def __init__(self, engine: Any, case: Case) -> None:
        self.engine, self.case = engine, case
        self.average: AveragedModel | None = None
        self.is_frozen = False

    def before(self, step: int) -> dict[str, Any]:
        """Before a step; what is seen, by name."""
        if step == 1 and self.case.get("trained") == "thawed":
            self.engine.hooked()[0].requires_grad_(True)
        first = self.case.get("first forward", "training")
        if step == 0 and first != "training":
            mode = torch.no_grad() if first == "no_grad" else torch.inference_mode()
            with evaluating(self.engine.model), mode:
                return {"loss before the first step": self.engine.evaluate()}
        if step == ACTION_STEP + 1 and self.is_frozen:
            self._freeze(False)
        if step != ACTION_STEP or (action := action_of(self.case)) == "none":
            return {}
        found: dict[str, Any] = getattr(self, "_" + action.replace(" ", "_"))() or {}
        return found

    def after_step(self) -> None:
        if self.average is not None:
            self.average.update_parameters(self.engine.model)

    def at_end(self) -> dict[str, Any]:
        if is_small(self.case):
            return {}
        seen = self._eval()
        if self.average is not None:
            weights = unwrapped(self.average.module.named_parameters())
            states = states_of(self.average.module)
            seen["average"] = {name: states[name] for name in states if name in weights}
        if dims_of(self.case) is not None:
            seen["losses of step()"] = self.engine.losses
        return seen

    def _eval(self) -> dict[str, Any]:
        with evaluating(self.engine.model):
            return {"loss in evaluation": self.engine.evaluate()}

    def _input_gradient(self) -> dict[str, Any]:
        model: Any = self.engine.model
        ids = probe(self.case).ids
        generator = torch.Generator().manual_seed(5)
        size = (*ids.shape, model.config.hidden_size)
        x = torch.randn(size, generator=generator, dtype=torch.float32, requires_grad=True)

        def loss() -> Any:
            given = x.double() if isinstance(self.engine, Alone) else x
            return model(inputs_embeds=given, labels=ids).loss

        with evaluating(model):
            (grad,) = torch.autograd.grad(loss(), x)
            loss().backward(inputs=[x])
        return {"gradients of inputs": [grad, x.grad]}

    def _deepcopy(self) -> None:
        self.average = AveragedModel(self.engine.model)

    def _generate(self) -> dict[str, Any]:
        model: Any = self.engine.model
        prompt = probe(self.case).ids[:, :3]
        with evaluating(model), torch.no_grad():
            tokens = model.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert int(tokens.max()) < NUM_CLASSES
        return {"tokens": tokens}

    def _state_dict(self) -> dict[str, Any]:
        return {"state_dict()": states_of(self.engine.model)}

    def _exception_in_forward(self) -> None:
        self._step_that_fails(self.engine.hooked()[-1].register_forward_pre_hook(_fail))

    def _exception_in_backward(self) -> None:
        def of_output(_: nn.Module, __: Any, output: Tensor) -> None:
            output.register_hook(_fail)  # the backward pass has gone through the last layer then

        self._step_that_fails(self.engine.hooked()[0].register_forward_hook(of_output))

    def _step_that_fails(self, handle: Any) -> None:
        """The user catches the error; of a pipeline nothing goes on after it."""
        is_caught = self.engine.is_whole
        caught = pytest.raises(ValueError, match=USERS_ERROR) if is_caught else nullcontext()
        with handle, caught:
            self.engine.run(range(ACTION_STEP, ACTION_STEP + 1))

    def _save_and_load(self) -> None:
        self.engine = self.engine.reloaded()

    def _freeze(self, is_frozen: bool = True) -> None:
        self.is_frozen = is_frozen
        for param in self.engine.hooked()[0].parameters():
            param.requires_grad_(not is_frozen)


def _fail(*_: Any) -> None:
    raise ValueError(USERS_ERROR)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    model.eval()
    try:
        yield
    finally:
        model.train()


def states_of(model: nn.Module) -> dict[str, Tensor]:
    """A model's state_dict() as plain tensors. Collective with DTensors."""
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).clone()
        for name, value in unwrapped(model.state_dict().items()).items()
        if value.is_floating_point()
    }
