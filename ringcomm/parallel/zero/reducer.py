"""When gradients are reduced: in backward passes, or at a step, in one order on all ranks."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ringcomm.backward_pass import (
    BackwardPass,
    OpenPasses,
    current_pass,
    in_backward,
    running_node,
    will_run,
)
from ringcomm.parallel.flat_collectives import InFlight, largest_of
from ringcomm.parallel.gradient_placeholder import GradientHooks, remove_hooks, weakly
from ringcomm.parallel.zero.bucket import Bucket
from ringcomm.parallel.zero.inner import NUM_OPTION_BYTES, check_options

# The bytes of a pass or a step that ranks share beside one of each weight: see _share_facts().
NUM_FACTS = 3 + NUM_OPTION_BYTES


class GradientReducer:
    """Collects the gradients of buckets' weights.

    With `reduces` each backward pass reduces every bucket once, in the same order on all ranks,
    even without gradients; docs/design/zero.md explains when. A later gradient waits for the next
    pass or the step, and so do those of `late` weights (see GradientHooks). Ranks may make
    different numbers of passes: a rank announces each pass, and ranks in agree() take part in it.
    With `defers` all of that is at the end of a pass, where sharded experts have exchanged their
    gradients: a rank in the middle of its pass would wait for one that waits for its tokens.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        group: dist.ProcessGroup,
        params: Iterable[nn.Parameter],
        late: Collection[nn.Parameter],
        *,
        reduces: bool,
        defers: bool,
    ) -> None:
        self._buckets, self.reduces, self._defers = buckets, reduces, defers
        # Ranks with other experts have other buckets of them.
        self._groups = list(dict.fromkeys([group, *(bucket.group for bucket in buckets)]))
        self._index = {param: i for i, bucket in enumerate(buckets) for param in bucket.params}
        self.hooks = GradientHooks(params, self, late)
        self._outer_hooks: list[Any] = []
        self._has_passed = False  # since the last call of join()
        self._in_flight = InFlight()
        # Since the last step gradients were reduced, on all ranks alike; and such were dropped.
        self.has_reduced = self._has_dropped = False
        self._passes: OpenPasses[None] = OpenPasses()  # also nested ones
        self._at_end = weakly(self._pass_ended)
        self.forget()

    def forget(self) -> None:
        """Resets the state for a new pass, also after a failed one."""
        self._in_flight.settle()
        remove_hooks(self._outer_hooks)
        self._outer_hooks = []
        self._has_begun, self._next = False, 0  # the bucket to reduce next
        self._passes.forget()
        # What the next bucket waits for, in a backward pass.
        self._expected: tuple[BackwardPass | None, nn.Parameter] | None = None
        # By bucket, the weights whose gradient is missing in this pass.
        self._left = [set(bucket.params) for bucket in self._buckets]

    # ---- by weight

    def take_gradient(self, param: nn.Parameter, grad: Tensor) -> None:
        """See GradientHooks. In a backward pass collective with `reduces`."""
        idx = self._index[param]
        is_in_pass = self.reduces and in_backward()
        if is_in_pass:
            if not self._has_begun:
                self._has_begun = self._has_passed = True
                if not self._defers:
                    self._share_facts()
            self._watch()
            if not self._defers:
                self._reduce_finished_before(idx)
        self._buckets[idx].take(param, grad)
        if is_in_pass and not self._defers:
            self._left[idx].discard(param)
            while self._next < len(self._buckets) and not self._left[self._next]:
                self._reduce_next()

    def drop_gradient(self, param: nn.Parameter) -> None:
        """See GradientHooks."""
        bucket = self._buckets[self._index[param]]
        if param in bucket.reduced:
            self._in_flight.settle()
            self._has_dropped = True  # this rank's part of the sum: the others must, too
        bucket.drop(param)

    def join(self) -> None:
        """To be called by all ranks after each backward pass of a pipeline's stage.

        A rank whose pass had no gradient for the buckets takes part in that of other ranks.
        Otherwise these would wait for its step, and its pipeline for them. Collective.
        """
        if not self.reduces or not self.hooks.nodes:
            return
        if not self._has_passed:
            self._share_facts()
            self._end_pass()
        self._has_passed = False

    def drop_all(self) -> None:
        """Drops all gradients. Collective after a backward pass that has failed."""
        try:
            if not in_backward():
                self._complete()
        except BaseException:
            self.forget()
            raise
        finally:
            self._has_dropped |= self.has_reduced
            self.drop()

    def drop(self) -> None:
        """Drops all gradients of this rank."""
        self.has_reduced = self._has_passed = False
        for bucket in self._buckets:
            bucket.forget_gradients()

    def _complete(self) -> None:
        """Ends a pass that has failed, in which other ranks may have come further."""
        if self._has_begun and not self._defers:
            self._end_pass()
        self.forget()

    # ---- agreement of all ranks

    def agree(self, options: Sequence[int]) -> tuple[int, set[Any]]:
        """Whether any rank has a gradient; weights with one, and buckets with a fresh one.

        `options` are compared by check_options(), which raises on all ranks.
        Collective: one MAX all_reduce for each group of buckets, and each backward pass that only
        other ranks make. Raises RuntimeError on all ranks: some have dropped gradients.
        """
        self._complete()
        while (found := self._share_facts(options))[0] == 2:
            self._end_pass()
        self._has_dropped = self._has_passed = False
        return found

    def _share_facts(self, options: Sequence[int] = ()) -> tuple[int, set[Any]]:
        """Of any rank: 2 if a pass begins, 1 if a gradient is there, or 0; see agree().

        A pass has no options.
        """
        has_dropped: list[int] = [self._has_dropped, not self._has_dropped]
        mine: set[Any] = {param for b in self._buckets for param in b.arrived | b.reduced}
        found, what = 0, int(bool(mine)) if options else 2
        mine |= {bucket for bucket in self._buckets if bucket.arrived}
        present = set[Any]()
        for group in self._groups:
            buckets = [bucket for bucket in self._buckets if bucket.group is group]
            keys = [*(param for bucket in buckets for param in bucket.params), *buckets]
            own_options = options or [0] * NUM_OPTION_BYTES
            facts = [what, *has_dropped, *own_options, *(key in mine for key in keys)]
            if group is not None:
                facts = largest_of(facts, [group], torch.uint8)
            found, has_dropped = max(found, facts[0]), facts[1:3]
            if found < 2:
                check_options(facts[3:NUM_FACTS])
            present |= {key for key, is_so in zip(keys, facts[NUM_FACTS:], strict=True) if is_so}
        if all(has_dropped):
            self.forget()
            self.drop()
            self._has_dropped = False
            raise RuntimeError(
                "the program has dropped gradients on some ranks that others still count, as after"
                " an exception on one rank, or by param.grad = None where some ranks had none. All"
                " gradients are dropped now, and no weight has been written: call the optimizer's"
                " zero_grad() on all ranks and go on"
            )
        return found, present

    # ---- by pass

    def _reduce_next(self) -> None:
        bucket, self._next = self._buckets[self._next], self._next + 1
        self._in_flight.run(bucket.reduce, bucket.buffer())

    @torch.no_grad()
    def _end_pass(self) -> None:
        self.has_reduced = True
        while self._next < len(self._buckets):
            self._reduce_next()
        self.forget()

    def _reduce_finished_before(self, idx: int) -> None:
        """Reduces the buckets before `idx` that get no more gradients in this backward pass."""
        current = current_pass()
        while self._next < idx:
            left, expected = self._left[self._next], self._expected
            if expected and expected[0] == current and expected[1] in left:
                return
            for param in left:
                node = self.hooks.nodes.get(param)
                if node is not None and will_run(node):
                    self._expected = current, param
                    return
            self._reduce_next()

    def _watch(self, *_: Any) -> None:
        """Makes the engine call _pass_ended() at the end of the current backward pass."""
        self._passes.enter(self._at_end)

    def _pass_ended(self, _: None) -> None:
        """Called at the end of a backward pass, or of the nested one of a reentrant checkpoint."""
        outer: Any = running_node()
        if outer is None:
            if self._defers:
                self._share_facts()
            self._end_pass()
            return
        # A node of the outer pass has run this one. Later nodes run in the outer pass.
        for node, _ in outer.next_functions:
            if node is not None:
                self._outer_hooks.append(node.register_prehook(weakly(self._watch)))
