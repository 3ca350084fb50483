"""The efficiency of offload: the figures of the ZeRO-Infinity paper's section 4."""

from __future__ import annotations

from typing import Any

import pytest

from ringcomm.parallel import offload

TERA = 1e12
GIGA = 1e9
PEAK = 70 * TERA


@pytest.mark.parametrize(
    ("intensity", "bandwidth", "percent"),
    [
        (offload.weight_intensity(1024), 70 * GIGA, 50.6),
        (offload.optimizer_intensity(2 * 1024), 1.5 * TERA, 91.6),
        (offload.checkpoint_intensity(2048), 2 * GIGA, 58.4),
    ],
)
def test_figures_of_the_paper(intensity: float, bandwidth: float, percent: float) -> None:
    assert 100 * offload.efficiency(intensity, bandwidth, PEAK) == pytest.approx(percent, abs=0.05)


def test_intensities() -> None:
    assert offload.weight_intensity(8 * 512) == 8 * 512  # seq * bsz
    assert offload.weight_intensity(100, itemsize=4) == 50
    assert offload.optimizer_intensity(8 * 512) == 8 * 512 / 4
    assert offload.checkpoint_intensity(1024, 3) == 24 * 1024 * 3


@pytest.mark.parametrize("values", [(0, 1, 1), (1, -1, 1), (1, 1, float("inf"))])
def test_what_is_no_rate_is_refused(values: tuple[Any, Any, Any]) -> None:
    with pytest.raises(ValueError, match="is a positive number"):
        offload.efficiency(*values)
