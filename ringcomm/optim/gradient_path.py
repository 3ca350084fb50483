"""The path of a gradient: it arrives, is counted, reduced over the ranks, and kept or applied.

"The path of a gradient" in docs/design/optim.md has it as a table.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ringcomm.backward_pass import BackwardPass, OpenPasses, current_pass, keeps_graph
from ringcomm.optim.agreements import Alone, Replicas, SameWeights
from ringcomm.optim.gradient_use import GradientUse
from ringcomm.optim.slot import Groups, Slot, roots_of_pass, running_functions
from ringcomm.parallel.gradient_placeholder import weakly
from ringcomm.torch_names import clones_saved_tensors


class GradientPath:
    """The gradients of all weights of an optimizer within a step.

    Attributes:
        slots: the weights, in the order of the parameter groups.
        replicas: the groups over which gradients are averaged, in the order of all ranks.
        alone: the other weights.
    """

    _updated: list[str]  # weights, when the last backward pass ended

    def __init__(self, use: GradientUse) -> None:
        self._use = use
        self.slots: list[Slot] = []
        self.replicas: list[Replicas] = []
        self.alone = Alone([], use)
        self._same: dict[Groups, SameWeights] = {}
        self._passes: OpenPasses[bool] = OpenPasses()  # with a gradient; whether they are nested
        self._forget_gradients()

    def watch_shards(self) -> None:
        """Called when all slots exist: those of one mesh agree on their gradients."""
        for peers in {slot.peers: None for slot in self.slots if slot.peers}:
            self._same[peers] = SameWeights([s for s in self.slots if s.peers == peers])

    # ---- arriving

    def arrived(self, slot: Slot) -> None:
        """Autograd has run all of a backward pass that leads to the parameter."""
        with exact(slot.param.device):
            is_nested = self._enter_pass()
            factors = None if slot.handle is None else slot.handle.take_factors(slot.name)
            if slot.note_arrival(factors, self._use.check_step, is_nested=is_nested):
                slot.reducer.take_turn(slot)

    def whole_arrived(self, slot: Slot) -> None:
        """Autograd has made a full gradient, which fully_shard will reduce."""
        if self._enter_pass() and slot.first_runs:
            raise RuntimeError(
                f"{slot.name} is used by several segments of a reentrant checkpoint, and"
                " fully_shard loses gradients of all but one: set use_reentrant=False"
            )
        self._same[slot.peers].expect(slot)

    def updated(self) -> list[str]:
        """The weights that were updated in backward passes, except in one that has raised."""
        if self._passes:
            return self._updated
        return [slot.name for slot in self.slots if slot.is_written]

    def check_continues(self) -> None:
        """Raises RuntimeError if a backward pass has raised under fully_shard."""
        if self._passes and any(slot.whole is not slot.param for slot in self.slots):
            raise RuntimeError(
                "a backward pass raised an error under fully_shard, which cannot continue: rebuild"
                " the model and its optimizer from a checkpoint"
            )

    def _enter_pass(self) -> bool:
        """Notes the current backward pass; returns whether it is nested."""
        return self._passes.enter(self._pass_ends, begin=self._pass_begins)

    def _pass_begins(self) -> bool:
        if clones_saved_tensors():
            raise RuntimeError(
                "allow_mutation_on_saved_tensors() is active in a backward pass that updates"
                " weights, and would clone them: leave it before backward()"
            )
        if keeps_graph():
            again = partial(weakly(self._runs_again), current_pass())
            for root in roots_of_pass():
                if root.grad_fn is not None:
                    root.grad_fn.register_prehook(again)
        is_nested = running_functions()[1] is not None or bool(self._passes)
        self.alone.is_checked = self.alone.is_checked and is_nested
        return is_nested

    def _runs_again(self, before: BackwardPass, _: Any) -> None:
        """Called when a graph runs again; torch would not say what has changed its weights."""
        for slot in self.slots:
            slot.refuse_second(slot.is_written and slot.arrived_in == before)

    def _pass_ends(self, is_nested: bool) -> None:
        """Expected gradients that are missing count as zeros."""
        for replicas in () if is_nested else self.replicas:
            with exact(self.slots[0].param.device):
                replicas.take_turns(all_of_them=True)
        self._updated = self.updated()
        for slot in () if is_nested else self.slots:
            slot.show()

    # ---- the step as a whole

    def two_passes(self, loss: Tensor) -> None:
        """Runs the backward pass for the facts, then to update.

        Raises RuntimeError, before a write, if a gradient is not finite.
        """
        use, uses = self._use, [(slot.first_runs.copy(), slot.has_plain_use) for slot in self.slots]
        try:
            use.phase = "facts"
            try:
                loss.backward(retain_graph=True)
            except RuntimeError as error:
                if "donated buffers" not in str(error):
                    raise
                raise RuntimeError(
                    'clip_mode="two_pass" runs the backward pass twice, but code of torch.compile'
                    ' frees its buffers in the first: use clip_mode="deferred", or'
                    " set torch._functorch.config.donated_buffer = False before the model compiles"
                ) from error
            self.end_pass()
            factor = use.factor_of_facts(self.slots[0].local.device)
            for slot, known in zip(self.slots, uses, strict=True):
                slot.num_arrived = 0
                slot.first_runs, slot.has_plain_use = known
            self._forget_agreements()
            if factor is not None:
                use.phase, use.factor = "update", factor
                loss.backward()
                self.end_pass()
                self._forget_agreements()
        except BaseException:  # what waits for a turn has no factor
            with exact(self.slots[0].param.device):
                self._forget_gradients()
            use.has_gradient = use.phase == "update"
            raise
        finally:
            use.phase, use.factor = "two_pass", 1.0

    def end_pass(self) -> None:
        """Completes weights that had no gradient in the whole backward pass.

        After a backward pass that raised, those of the gradients that have arrived. Collective if
        ranks share the work; a rank without any gradient participates.
        """
        with exact(self.slots[0].param.device):
            if self._passes:  # one has raised: gradients that it expected will not come
                self._forget_agreements()
            if any(slot.has_grad for slot in self.slots):
                self._use.check_phase()
            expects = self._agrees()
            for same in self._same.values():
                if expects and not same.has_agreed:
                    same.agree(None)
            for replicas in self.replicas if expects else ():
                replicas.end_pass()
            self.alone.end_pass()

    def _agrees(self) -> bool:
        """Other ranks may have had gradients; two passes agree in backward() alone."""
        return self._use.phase != "two_pass"

    @contextmanager
    def failing_for_all(self) -> Iterator[None]:
        """A context in place of end_pass() where it raises: the others raise where they agree."""
        try:
            yield
        except Exception:
            untold = [replicas for replicas in self.replicas if not replicas.was_told]
            for replicas in untold if self._agrees() else ():
                with suppress(Exception):
                    replicas.agree(None, fails=True)
            raise

    def finish(self) -> bool:
        """Applies deferred gradients; returns whether the step was made or skipped."""
        with exact(self.slots[0].param.device):
            return self._use.finish(self.slots)

    def forget(self) -> None:
        """Discards the state of this step. Not inside a backward pass."""
        self._passes.forget()
        with exact(self.slots[0].param.device):
            self._forget_gradients()

    def _forget_agreements(self) -> None:
        for replicas in self.replicas:
            replicas.forget()
        for same in self._same.values():
            same.forget()

    def _forget_gradients(self) -> None:
        self._forget_agreements()
        for slot in self.slots:
            slot.forget()
        self._use.forget()
        self.alone.is_checked = False
        self._updated = []


@contextmanager
def exact(device: torch.device) -> Iterator[None]:
    """Disables gradients and autocast, which would round fp32 sums."""
    kind = device.type if torch.amp.is_autocast_available(device.type) else "cpu"  # not on meta
    with torch.no_grad(), torch.autocast(kind, enabled=False):
        yield
