"""Going on after a rank has died: who lives, and a new group of those ranks."""

from ringcomm.survivors.deaths import Health, health, on_death
from ringcomm.survivors.shrink import shrink

__all__ = ["Health", "health", "on_death", "shrink"]
