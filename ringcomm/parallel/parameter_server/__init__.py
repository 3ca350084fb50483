"""A parameter server (Li et al. 2014): workers push gradients and pull weights, at their own pace."""

from ringcomm.parallel.parameter_server.parameter_server import ParameterServer

__all__ = ["ParameterServer"]
