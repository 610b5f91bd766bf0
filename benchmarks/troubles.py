"""Data that is unkind to a filter: ties at the cut, scores a rounding apart, numbers at the edges.

The benchmarks count what such data costs; that the answer is right, the tests show.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass
class Drawn:
    """Hold Gaussian inputs, float32, for a trouble to change in place.

    Args:
        query: [B, S, H, D].
        key: [B, T, D].
        weights: [B, S, H].
        bias: [B, 1, S, T], zero.
        rng: for whatever else is drawn.
    """

    query: Floats
    key: Floats
    weights: Floats
    bias: Floats
    rng: np.random.Generator

    def share_of_keys(self, share: float) -> NDArray[np.bool_]:
        """Return which keys belong to a random share of them: [B, T]."""
        return self.rng.random(self.key.shape[:2]) < share


def drawn(B: int, S: int, T: int, H: int, D: int, *, seed: int) -> Drawn:
    """Return Gaussian inputs of these sizes."""
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal
    return Drawn(
        normal((B, S, H, D), np.float32),
        normal((B, T, D), np.float32),
        normal((B, S, H), np.float32),
        np.zeros((B, 1, S, T), np.float32),
        rng,
    )


def _repeat_few_keys(inputs: Drawn) -> None:
    inputs.key[:] = inputs.key[:, inputs.rng.integers(0, 8, inputs.key.shape[1])]


def _tie_a_fifth_at_the_top(inputs: Drawn) -> None:
    """Leave too few distinct keys above the cut: the cut falls into one plateau."""
    is_tied = inputs.share_of_keys(0.2)
    # Every head likes such a key, and every head's weight counts for it.
    best = 4 * inputs.query[:, :1].mean(axis=2)
    np.abs(inputs.weights, out=inputs.weights)
    inputs.key[is_tied] = np.broadcast_to(best, inputs.key.shape)[is_tied]


def _differ_in_last_place(inputs: Drawn) -> None:
    steps = inputs.rng.integers(-2, 3, inputs.key.shape).astype(np.float32)
    inputs.key[:] = inputs.key[:, :1] * (1 + steps * np.float32(2.0**-8))


def _cancel(inputs: Drawn) -> None:
    """Give large products that nearly cancel: the sums are small, their errors are not."""
    half = inputs.key.shape[2] // 2
    inputs.query[..., half:] = inputs.query[..., :half]
    inputs.key[..., half:] = -inputs.key[..., :half]
    inputs.key[..., :1] += 2.0**-4 * inputs.key[..., 1:2]


def _ignore_the_weights(inputs: Drawn) -> None:
    inputs.weights[:] = 0


def _scale_up(inputs: Drawn) -> None:
    inputs.key *= np.float32(1e18)
    inputs.query *= np.float32(1e17)


def _scale_down(inputs: Drawn) -> None:
    inputs.key *= np.float32(1e-22)
    inputs.query *= np.float32(1e-18)


def _mix_norms(inputs: Drawn) -> None:
    exponents = inputs.rng.integers(-12, 13, inputs.key.shape[:2])
    inputs.key *= np.exp2(exponents).astype(np.float32)[..., None]


def _break_some_keys(inputs: Drawn) -> None:
    inputs.key[inputs.share_of_keys(0.001)] = np.nan
    inputs.key[inputs.share_of_keys(0.001)] = np.inf


def _mask_most(inputs: Drawn) -> None:
    is_masked = inputs.rng.random(inputs.bias.shape) < 0.8
    inputs.bias[is_masked] = -np.inf


TROUBLES: dict[str, Callable[[Drawn], None]] = {
    "8 distinct keys": _repeat_few_keys,
    "a fifth ties at the top": _tie_a_fifth_at_the_top,
    "keys differ in the last place": _differ_in_last_place,
    "cancellation": _cancel,
    "all weights 0": _ignore_the_weights,
    "near overflow": _scale_up,
    "subnormal products": _scale_down,
    "norms from 2^-12 to 2^12": _mix_norms,
    "NaN and infinite keys": _break_some_keys,
    "four fifths masked": _mask_most,
}
"""By name, what each does to Gaussian inputs."""
