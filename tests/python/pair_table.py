"""Tables of features: which pairs equal one process, which are refused, and cases that meet all.

A table has axes (features) with values, the first of which is the plain one. A case takes a value
of every axis. `covering` has cases that hold every pair of values that is not refused;
`refusals` has cases for each pair that is.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

from allpairspy import AllPairs

Case = dict[str, str]
Condition = Mapping[str, tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class Refused:
    """Values that do not go together, and the error that says so.

    Attributes:
        when: by axis the values that meet; all axes must match.
        error: the name of the exception's class, or of several by |.
        says: a regular expression of its text.
        instead: what to do, for the documentation.
        besides: what a case must have besides, to be refused for this and nothing else.
        is_late: raised in the first step, but after the backward pass has written weights.
    """

    when: Condition
    error: str
    says: str
    instead: str
    besides: Condition = dataclasses.field(default_factory=dict)
    is_late: bool = False


@dataclasses.dataclass(frozen=True)
class Meaningless:
    """Values that say nothing together: an option without what it is for."""

    when: Condition


@dataclasses.dataclass(frozen=True)
class Table:
    """The features of one part of the library."""

    axes: Mapping[str, tuple[str, ...]]
    refused: tuple[Refused, ...]
    meaningless: tuple[Meaningless, ...]

    @property
    def plain(self) -> Case:
        """The first value of every axis."""
        return {axis: values[0] for axis, values in self.axes.items()}

    def refusals_of(self, case: Mapping[str, str]) -> list[Refused]:
        """Why a case, or a part of one, is refused; several reasons where several apply."""
        return [refused for refused in self.refused if _matches(refused.when, case)]

    def makes_sense(self, case: Mapping[str, str]) -> bool:
        """Whether no two values of a case, or of a part of one, are meaningless together."""
        return not any(_matches(item.when, case) for item in self.meaningless)

    def allows(self, case: Mapping[str, str]) -> bool:
        """Whether a case, or a part of one, is to equal one process."""
        return self.makes_sense(case) and not self.refusals_of(case)

    def pairs(self) -> Iterator[Case]:
        """Every pair of values of two axes."""
        for (a, a_values), (b, b_values) in itertools.combinations(self.axes.items(), 2):
            for x, y in itertools.product(a_values, b_values):
                yield {a: x, b: y}

    @cached_property
    def covering(self) -> list[Case]:
        """Allowed cases which hold every pair that an allowed case can hold."""
        names = list(self.axes)

        def is_allowed(row: list[str]) -> bool:
            return self.allows(dict(zip(names, row, strict=False)))

        rows = AllPairs([list(values) for values in self.axes.values()], filter_func=is_allowed)
        cases = [dict(zip(names, row, strict=True)) for row in rows]
        for pair in self.pairs():  # what the greedy search has given up
            if not any(pair.items() <= case.items() for case in cases):
                case = self._complete(pair, self.allows)
                if case is not None:
                    cases.append(case)
        return cases

    @cached_property
    def refusals(self) -> list[Case]:
        """Refused cases: for each refusal and its values a plain one, and some with all else."""
        found = []
        for refused in self.refused:
            conditions = {**refused.besides, **refused.when}
            for values in itertools.product(*conditions.values()):
                case = {**self.plain, **dict(zip(conditions, values, strict=True))}
                if self.makes_sense(case) and self.refusals_of(case) == [refused]:
                    found.append(case)
            found += self._mixed({axis: values[0] for axis, values in conditions.items()})
        tried = [*self.covering, *found]
        for pair in self.pairs():
            if not any(pair.items() <= case.items() for case in tried):
                other = self._complete(pair, self.makes_sense)
                found += [] if other is None else [other]
        return list({tuple(case.items()): case for case in found}.values())

    def _mixed(self, fixed: Case) -> Iterator[Case]:
        """Cases with some values, and every value of other axes that can be beside them."""
        seen: set[tuple[str, str]] = set()
        for turn in range(1, max(map(len, self.axes.values()))):
            case = dict(fixed)
            for axis, values in self.axes.items():
                turned = [values[(turn + i) % len(values)] for i in range(len(values))]
                fitting = [v for v in turned if self.makes_sense({**case, axis: v})]
                case.setdefault(axis, (fitting or turned)[0])
            if self.makes_sense(case) and not case.items() <= seen:
                seen |= case.items()
                yield {axis: case[axis] for axis in self.axes}

    def _complete(self, pair: Case, fits: Callable[[Case], bool]) -> Case | None:
        """A case with a pair that fits, as plain as can be; None where there is none."""
        case = dict(pair)
        if not self._fill(case, [axis for axis in self.axes if axis not in pair], fits):
            return None
        return {axis: case[axis] for axis in self.axes}

    def _fill(self, case: Case, rest: list[str], fits: Callable[[Case], bool]) -> bool:
        if not fits(case):
            return False
        if not rest:
            return True
        for value in self.axes[rest[0]]:
            case[rest[0]] = value
            if self._fill(case, rest[1:], fits):
                return True
        del case[rest[0]]
        return False


def _matches(when: Condition, case: Mapping[str, str]) -> bool:
    return all(case.get(axis) in values for axis, values in when.items())
