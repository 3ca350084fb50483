"""Sharded weights, gathered only while they are in use: for Lomo and ZeRO-Infinity."""

from ringcomm.parallel.shards.weight_shards import WeightShards, find_shards

__all__ = ["WeightShards", "find_shards"]
