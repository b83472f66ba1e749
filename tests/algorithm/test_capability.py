"""Accuracy, smoothed capability and capability ratio, by hand and by property."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hacpo.algorithm.capability import accuracy, capability_ratio, extend_window, omega_matrix, smoothed
from hacpo.errors import DataError
from hacpo.settings.algorithm import CapabilitySettings
from hacpo.settings.recipes import RECIPES


def settings(**changes: Any) -> CapabilitySettings:
    return CapabilitySettings.model_validate({**RECIPES["hacpo"]["capability"], **changes})


def test_the_settings_name_the_papers_equations() -> None:
    """omega is eq. 8, P and Phat are eq. 9."""
    equations = {"metric": "eq. 9", "window": "eq. 9", "floor": "eq. 9", "ratio_min": "eq. 8", "ratio_max": "eq. 8"}
    for name, equation in equations.items():
        extra = CapabilitySettings.model_fields[name].json_schema_extra
        assert isinstance(extra, dict)
        assert extra["source"] == equation


def test_accuracy_by_hand() -> None:
    # (1 + 0 + 0 + 1) / 4
    assert accuracy([[1.0, 0.0], [0.0, 1.0]], "reward_mean") == 0.5
    # (0.5 - 1 + 2 + 0) / 4 = 0.375; positive: 0.5 and 2 of four
    assert accuracy([0.5, -1.0, 2.0, 0.0], "reward_mean") == 0.375
    assert accuracy([0.5, -1.0, 2.0, 0.0], "positive_rate") == 0.5


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30), st.randoms())
def test_accuracy_ignores_the_order_of_rewards_to_the_last_bit(rewards: list[float], random: Any) -> None:
    shuffled = list(rewards)
    random.shuffle(shuffled)
    assert accuracy(rewards, "reward_mean") == accuracy(shuffled, "reward_mean")


@pytest.mark.parametrize("rewards", [[], [1.0, float("nan")], [float("inf")]])
def test_accuracy_refuses_what_has_no_mean(rewards: list[float]) -> None:
    with pytest.raises(DataError, match="rewards must be finite and at least one"):
        accuracy(rewards, "reward_mean")


def test_window_keeps_the_last_accuracies_oldest_first() -> None:
    window: tuple[float, ...] = ()
    seen = []
    for value in (0.1, 0.2, 0.3, 0.4):
        window = extend_window(window, value, 3)
        seen.append(window)
    assert seen == [(0.1,), (0.1, 0.2), (0.1, 0.2, 0.3), (0.2, 0.3, 0.4)]
    # A shorter K than the stored window keeps the newest.
    assert extend_window((0.1, 0.2, 0.3), 0.4, 1) == (0.4,)


@pytest.mark.parametrize(("previous", "now", "size"), [((), 0.1, 0), ((), float("nan"), 5), ((float("inf"),), 0.1, 5)])
def test_window_refuses_nonsense(previous: tuple[float, ...], now: float, size: int) -> None:
    with pytest.raises(DataError, match="capability window"):
        extend_window(previous, now, size)


def test_smoothed_by_hand() -> None:
    # (0.2 + 0.4 + 0.9) / 3 = 0.5
    assert smoothed((0.2, 0.4, 0.9), 1e-8) == pytest.approx(0.5, abs=1e-15)
    assert smoothed((0.0, 0.0), 1e-8) == 1e-8
    assert smoothed((-2.0,), 1e-8) == 1e-8
    for bad in ((), (float("nan"),)):
        with pytest.raises(DataError, match="finite and not empty"):
            smoothed(bad, 1e-8)


def test_ratio_by_hand() -> None:
    bounds = {"ratio_min": 0.1, "ratio_max": 10.0}
    assert capability_ratio(of=0.6, relative_to=0.3, **bounds) == 2.0
    assert capability_ratio(of=0.3, relative_to=0.6, **bounds) == 0.5
    # 0.5 / 1e-8 = 5e7 -> 10; 1e-8 / 0.5 -> 0.1
    assert capability_ratio(of=0.5, relative_to=1e-8, **bounds) == 10.0
    assert capability_ratio(of=1e-8, relative_to=0.5, **bounds) == 0.1
    # A quotient too large for a float is bounded too.
    assert capability_ratio(of=1e308, relative_to=1e-308, **bounds) == 10.0


@pytest.mark.parametrize("bad", [0.0, -0.1, float("nan"), float("inf")])
def test_ratio_refuses_capabilities_without_a_ratio(bad: float) -> None:
    for of, relative_to in ((bad, 0.5), (0.5, bad)):
        with pytest.raises(DataError, match="finite and positive"):
            capability_ratio(of=of, relative_to=relative_to, ratio_min=0.1, ratio_max=10.0)


def test_matrix_by_hand() -> None:
    # rows: of k; columns: relative to j. .6/.3 = 2, .6/.01 = 60 -> 10, .3/.01 = 30 -> 10, and the inverses, -> .1
    expected = [[1.0, 2.0, 10.0], [0.5, 1.0, 10.0], [0.1, 0.1, 1.0]]
    np.testing.assert_array_equal(omega_matrix([0.6, 0.3, 0.01], settings()), expected)
    np.testing.assert_array_equal(omega_matrix([0.25], settings()), [[1.0]])
    with pytest.raises(DataError, match="one number per agent"):
        omega_matrix([[0.5, 0.5]], settings())


@given(st.lists(st.floats(1e-8, 1.0), min_size=1, max_size=6), st.data())
def test_matrix_properties(capabilities: list[float], data: st.DataObject) -> None:
    omega_nn = omega_matrix(capabilities, settings())
    assert (np.diag(omega_nn) == 1.0).all()
    assert ((omega_nn >= 0.1) & (omega_nn <= 10.0)).all()
    # The bounds are each other's inverse, so omega^(k,j) omega^(j,k) = 1 up to two roundings.
    np.testing.assert_allclose(omega_nn * omega_nn.T, 1.0, rtol=4e-16)
    order = data.draw(st.permutations(range(len(capabilities))))
    np.testing.assert_array_equal(
        omega_matrix([capabilities[i] for i in order], settings()), omega_nn[np.ix_(order, order)]
    )
