"""Sharded weights, gathered only while they are in use: for Lomo and ZeRO-Infinity."""

from ringcomm.parallel.model.axes import find_shards
from ringcomm.parallel.shards.weight_shards import WeightShards

__all__ = ["WeightShards", "find_shards"]
