"""Removed public names: an AttributeError that says what to use instead."""

from __future__ import annotations

from importlib import import_module

import pytest

from ringcomm._renamed import _GONE, _GONE_METHODS, object_getattr

NAMES = [(module, name) for module, names in _GONE.items() for name in names]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_removed_names_say_what_to_use(module: str, name: str) -> None:
    package = import_module(module)
    assert name not in package.__all__
    with pytest.raises(AttributeError, match=rf"'{name}': it (was removed; |is )"):
        getattr(package, name)
    with pytest.raises(AttributeError, match=r"no attribute 'anything'$"):
        package.anything  # noqa: B018


def test_removed_methods_say_what_to_use() -> None:
    parallel = import_module("ringcomm.parallel")
    kinds = [parallel.ParameterServer, parallel.WeightShards]
    kinds += [parallel.pipeline.Pipeline, parallel.zero.ZeroInfinity]
    kinds += [parallel.zero.FlatZero, parallel.zero.Zero3]
    assert {kind.__name__ for kind in kinds} == set(_GONE_METHODS)
    for kind in kinds:
        assert kind.__getattr__ is object_getattr
        for name in _GONE_METHODS[kind.__name__]:
            with pytest.raises(AttributeError, match=rf"'{name}': it was removed; .*(use|returns)"):
                getattr(kind.__new__(kind), name)
        with pytest.raises(AttributeError, match=r"no attribute 'anything'$"):
            kind.__new__(kind).anything  # noqa: B018
