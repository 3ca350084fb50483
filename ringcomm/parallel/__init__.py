"""Systems that split training over ranks."""

from ringcomm.parallel.weight_shards import WeightShards, find_shards

__all__ = ["WeightShards", "find_shards"]
