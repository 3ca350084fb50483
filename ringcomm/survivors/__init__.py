"""Going on after a rank has died: who lives, and a new group of those ranks."""

from ringcomm.survivors.health import Health, health
from ringcomm.survivors.shrink import shrink

__all__ = ["Health", "health", "shrink"]
