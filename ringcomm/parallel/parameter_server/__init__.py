"""A parameter server (Li et al. 2014): workers push gradients and pull weights, in step or not."""

from ringcomm.parallel.parameter_server.parameter_server import ParameterServer

__all__ = ["ParameterServer"]
