"""What can be chosen when a group is made."""

from dataclasses import dataclass
from typing import Literal

from ringcomm import env

__all__ = ["Options"]

AlgorithmName = Literal["auto", "one_shot", "two_shot", "ring"]


@dataclass(frozen=True)
class Options:
    """Options of a group: `dist.init_process_group("ringcomm", pg_options=ringcomm.Options(...))`.

    They are compared between the ranks when the group is made; a difference raises MismatchError on
    every rank. Where a field is left at its default, the environment variable RINGCOMM_<FIELD>
    decides if it is set.

    Attributes:
        algorithm: of all_reduce. "auto" chooses by size and number of ranks.
        num_slots: slots of a ring link, 2 to 64.
        slot_bytes: bytes of a slot, a multiple of 64. None takes 262144.
    """

    algorithm: AlgorithmName = "auto"
    num_slots: int = 2
    slot_bytes: int | None = None

    def with_environment(self) -> "Options":
        """The same, with environment variables in place of what was left at its default.

        Raises:
            ValueError: a variable has no valid form.
        """
        default = Options()
        algorithm, num_slots, slot_bytes = self.algorithm, self.num_slots, self.slot_bytes
        if algorithm == default.algorithm and (name := env.algorithm()) is not None:
            algorithm = name  # type: ignore[assignment]
        if num_slots == default.num_slots and (number := env.num_slots()) is not None:
            num_slots = number
        if slot_bytes is None:
            slot_bytes = env.slot_bytes()
        return Options(algorithm=algorithm, num_slots=num_slots, slot_bytes=slot_bytes)
