"""Removed public names: an AttributeError that says what to use instead."""

from __future__ import annotations

from importlib import import_module

import pytest

from ringcomm._renamed import _GONE

NAMES = [(module, name) for module, names in _GONE.items() for name in names]


@pytest.mark.parametrize(("module", "name"), NAMES)
def test_removed_names_say_what_to_use(module: str, name: str) -> None:
    package = import_module(module)
    assert name not in package.__all__
    with pytest.raises(AttributeError, match=rf"'{name}': it (was removed; |is )"):
        getattr(package, name)
    with pytest.raises(AttributeError, match=r"no attribute 'anything'$"):
        package.anything  # noqa: B018
