"""Seeds for stochastic rounding."""

_MASK = (1 << 64) - 1


def _mix(value: int) -> int:
    """splitmix64 (Steele, Lea and Flood 2014): one to one on 64 bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def rounding_seed(seed: int, weight_idx: int, step: int) -> int:
    """The seed of a weight's random bits in a step: the same on all ranks, and after a resume."""
    return _mix(_mix((seed << 32 | weight_idx) & _MASK) ^ step) >> 1
