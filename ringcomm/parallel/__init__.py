"""What several ranks hold of one model."""

from ringcomm.parallel import zero
from ringcomm.parallel.weight_shards import WeightShards, find_shards

__all__ = ["WeightShards", "find_shards", "zero"]
