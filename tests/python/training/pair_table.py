"""Tables of features: which pairs equal one process, which are refused, and cases that meet all.

A table has axes (features) with values, the first of which is the plain one. A case takes a value
of every axis. `covering` has cases that hold every pair of values that is not refused;
`refusals` has a plain case for each refusal, and cases for all pairs that are left.
"""

from __future__ import annotations

import dataclasses
import itertools
import random
import re
import textwrap
from collections.abc import Iterable, Mapping
from functools import cache, cached_property

Case = dict[str, str]
Condition = Mapping[str, tuple[str, ...]]
Pair = frozenset[tuple[str, str]]
# Cases of which the best is taken.
NUM_DRAWS = 30


@cache
def condition(words: str) -> Condition:
    """By axis the values that meet: "axis: value or value; axis: value"."""
    parts = (part.split(": ") for part in words.split("; ") if part)
    return {axis: tuple(values.split(" or ")) for axis, values in parts}


def conditions(text: str) -> tuple[Condition, ...]:
    """One of each line; lines with # say why."""
    lines = [line.strip() for line in text.split("\n")]
    return tuple(condition(line) for line in lines if line and not line.startswith("#"))


@dataclasses.dataclass(frozen=True)
class Refused:
    """Values that do not go together, and the error that says so.

    Attributes:
        when: the values that meet; see condition().
        raises: the names of exceptions by |; after ": " a regular expression of their text.
        instead: what to do, for the documentation.
        besides: what a case must have besides, to be refused for this and nothing else.
        only_with: what a case must have for the error; with other values it ends in a time-out.
        is_late: raised in the first step, but after the backward pass has written weights.
    """

    when: str
    raises: str
    instead: str
    besides: str = ""
    only_with: str = ""
    is_late: bool = False

    def explains(self, kind: str, text: str, is_unchanged: bool) -> bool:
        """Whether an error is this one."""
        kinds, _, says = self.raises.partition(": ")
        is_right = kind in kinds.split("|") and re.search(says, text) is not None
        return is_right and (is_unchanged or self.is_late)


@dataclasses.dataclass(frozen=True)
class Table:
    """The features of one part of the library.

    Attributes:
        axes: by feature its values.
        refused: what does not go together.
        meaningless: what says nothing together.
        also: more values which were wrong together once.
        strength: how many values of different axes are tried together: 2 for pairs.
    """

    axes: Mapping[str, tuple[str, ...]]
    refused: tuple[Refused, ...]
    meaningless: tuple[Condition, ...]
    also: tuple[Mapping[str, str], ...] = ()
    strength: int = 2

    @staticmethod
    def of(
        axes: str, refused: str, meaningless: str, also: tuple[str, ...] = (), strength: int = 2
    ) -> Table:
        """A table that is written as text.

        Args:
            axes: a line "axis: value | value" of each.
            refused: of each the line `when`, and indented `raises`, `instead`, and what else it
                has: "besides CONDITION", "only with CONDITION", "late".
            meaningless: see conditions().
            also: conditions with one value of each axis.
            strength: see the attributes.
        """
        lines = re.sub(r"\s+\|", " |", axes).strip().split("\n")
        split = (line.strip().split(": ", 1) for line in lines)
        return Table(
            {axis: tuple(values.split(" | ")) for axis, values in split},
            tuple(map(_refused, re.split(r"\n(?! )", textwrap.dedent(refused).strip()))),
            conditions(meaningless),
            tuple({axis: value for axis, (value,) in condition(c).items()} for c in also),
            strength,
        )

    @cached_property
    def plain(self) -> Case:
        return {axis: values[0] for axis, values in self.axes.items()}

    def refusals_of(self, case: Mapping[str, str]) -> list[Refused]:
        """Why a case, or a part of one, is refused; several reasons where several apply."""
        return [each for each in self.refused if _matches(condition(each.when), case)]

    def makes_sense(self, case: Mapping[str, str]) -> bool:
        """Whether no two values of a case, or of a part of one, are meaningless together."""
        return not any(_matches(when, case) for when in self.meaningless)

    def allows(self, case: Mapping[str, str]) -> bool:
        """Whether a case, or a part of one, is to equal one process."""
        return self.makes_sense(case) and not self.refusals_of(case)

    def pairs_beside(self, cases: Iterable[Case]) -> list[Case]:
        """Pairs of values of two axes that no case holds; or as many values as `strength`."""
        held = {pair for case in cases for pair in self.pairs_of(case)}
        return [
            dict(zip(axes, values, strict=True))
            for axes in itertools.combinations(self.axes, self.strength)
            for values in itertools.product(*(self.axes[axis] for axis in axes))
            if frozenset(zip(axes, values, strict=True)) not in held
        ]

    @cached_property
    def covering(self) -> list[Case]:
        """Allowed cases which hold every pair that an allowed case can hold, and `also`."""
        never = [*self.meaningless, *(condition(each.when) for each in self.refused)]
        also = [{**self.plain, **values} for values in self.also]
        return also + self._cover(self.pairs_beside(also), never)

    @cached_property
    def refusals(self) -> list[Case]:
        """Refused cases: for each refusal and its values a plain one; and for all pairs left."""
        found = []
        for refused in self.refused:
            conditions = dict[str, tuple[str, ...]]()
            for words in (refused.besides, refused.only_with, refused.when):
                conditions |= condition(words)
            for values in itertools.product(*conditions.values()):
                case = {**self.plain, **dict(zip(conditions, values, strict=True))}
                if self.makes_sense(case) and self.refusals_of(case) == [refused]:
                    found.append(case)
        never = [*self.meaningless]
        for refused in self.refused:  # and would end in a time-out
            for axis, values in condition(refused.only_with).items():
                others = tuple(value for value in self.axes[axis] if value not in values)
                never.append({**condition(refused.when), axis: others})
        return found + self._cover(self.pairs_beside([*self.covering, *found]), never)

    def _cover(self, pairs: list[Case], never: list[Condition]) -> list[Case]:
        """Few cases that hold the pairs that any case can hold which no condition is true of.

        Each is the best of several that are drawn and filled greedily; the same in every run.
        """
        draw = random.Random(0)
        conditions = {
            (axis, value): [when for when in never if value in when.get(axis, ())]
            for axis, values in self.axes.items()
            for value in values
        }
        left = {frozenset(pair.items()): pair for pair in pairs}
        cases = []
        while left:
            found: list[Case] = []
            for pair in draw.sample(list(left.values()), min(len(left), NUM_DRAWS)):
                names = draw.sample(list(self.axes), len(self.axes))
                case = self._fill(pair, {axis: self.axes[axis] for axis in names}, conditions, left)
                if case is None:  # no case holds it
                    del left[frozenset(pair.items())]
                else:
                    found.append(case)
            if found:
                best = max(found, key=lambda case: len(self.pairs_of(case) & left.keys()))
                cases.append({axis: best[axis] for axis in self.axes})
                for held in self.pairs_of(best):
                    left.pop(held, None)
        return cases

    def _fill(
        self,
        case: Case,
        choices: Mapping[str, tuple[str, ...]],
        conditions: Mapping[tuple[str, str], list[Condition]],
        left: Mapping[Pair, Case],
    ) -> Case | None:
        """Completes a case by `choices` that hold as many of the pairs that are left as can be.

        `conditions` are by axis and value those that must not be true.
        """

        def fits(axis: str, value: str) -> bool:
            tried = case | {axis: value}
            return not any(_matches(when, tried) for when in conditions[axis, value])

        choices = {
            axis: tuple(value for value in values if fits(axis, value))
            for axis, values in choices.items()
            if axis not in case
        }
        if not all(fits(*item) for item in case.items()):
            return None
        if not choices:
            return case
        axis = min(choices, key=lambda axis: len(choices[axis]))

        def gain(value: str) -> int:
            others = itertools.combinations(case.items(), self.strength - 1)
            return sum(frozenset([(axis, value), *items]) in left for items in others)

        for value in sorted(choices[axis], key=gain, reverse=True):
            rest = {other: values for other, values in choices.items() if other != axis}
            found = self._fill(case | {axis: value}, rest, conditions, left)
            if found is not None:
                return found
        return None

    def pairs_of(self, case: Case) -> set[Pair]:
        """Every pair of values that a case holds, or as many as `strength`."""
        return {frozenset(pair) for pair in itertools.combinations(case.items(), self.strength)}


def _refused(text: str) -> Refused:
    when, raises, instead, *rest = map(str.strip, text.split("\n"))
    words = "^(besides|only with|late) ?(.*)"
    more = {key: value for line in rest for key, value in re.findall(words, line)}
    assert len(more) == len(rest), rest
    besides, only_with = more.get("besides", ""), more.get("only with", "")
    return Refused(when, raises, instead, besides, only_with, "late" in more)


def _matches(when: Condition, case: Mapping[str, str]) -> bool:
    return all(case.get(axis) in values for axis, values in when.items())
