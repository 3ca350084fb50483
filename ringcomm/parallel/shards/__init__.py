"""Weights in shards, whole only while they are at work: for Lomo, and for ZeRO-Infinity."""

from ringcomm.parallel.shards.weight_shards import WeightShards, find_shards

__all__ = ["WeightShards", "find_shards"]
