"""Bootstrap intervals of means (Efron, 1979; percentile method)."""

from collections.abc import Hashable, Iterator, Sequence

import numpy as np

LEVEL = 0.95  # coverage of an interval, unless said otherwise
_DRAWS_AT_ONCE = 4_000_000  # resampled values in memory together (32 MB)


def bootstrap(
    values: Sequence[float],
    *,
    resamples: int,
    seed: int,
    level: float = LEVEL,
    groups: Sequence[Hashable] | None = None,
) -> tuple[float, float]:
    """(low, high) of the mean of `values`: percentiles of the means of resampled items.

    What is drawn must be independent. Where items share a case (the turns of a game), `groups`
    names the case of each, and whole cases are drawn.
    The same values, resamples and seed always give the same interval. Raises ValueError for no
    values, values that are not finite, resamples < 1 or a level outside (0, 1).
    """
    items = _finite(values)
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}")
    if not 0.0 < level < 1.0:
        raise ValueError(f"level must be between 0 and 1, got {level}")
    totals, counts = _cases(items, range(items.size) if groups is None else groups)
    means = np.concatenate(list(_resampled_means(totals, counts, resamples, seed)))
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def measure(
    values: Sequence[float],
    *,
    resamples: int,
    seed: int,
    groups: Sequence[Hashable] | None = None,
) -> dict:
    """{"value": mean, "interval": [low, high]} of `bootstrap`."""
    interval = bootstrap(values, resamples=resamples, seed=seed, groups=groups)
    return {"value": float(_finite(values).mean()), "interval": list(interval)}


def paired_difference(
    before: Sequence[float],
    after: Sequence[float],
    *,
    resamples: int,
    seed: int,
    level: float = LEVEL,
) -> tuple[float, float, float]:
    """(difference, low, high) of mean(after) - mean(before), item i of both being the same case.

    Resampling the per-item differences keeps what the two share (an easy game is easy for both),
    so the interval is narrower than one from two separate bootstraps. Raises ValueError as
    `bootstrap` does, and for different numbers of items.
    """
    if len(before) != len(after):
        raise ValueError(f"pairs need equal lengths: {len(before)} before, {len(after)} after")
    difference = _finite(after) - _finite(before)
    low, high = bootstrap(difference, resamples=resamples, seed=seed, level=level)
    return float(difference.mean()), low, high


def _finite(values: Sequence[float]) -> np.ndarray:
    items = np.asarray(values, dtype=np.float64)
    if items.ndim != 1 or items.size == 0:
        raise ValueError(f"need a list of at least one value, got shape {items.shape}")
    if not np.isfinite(items).all():
        raise ValueError("values must be finite")
    return items


def _cases(items: np.ndarray, groups: Sequence[Hashable]) -> tuple[np.ndarray, np.ndarray]:
    """Sum and number of the items of each case, in the order in which the cases come."""
    if len(groups) != items.size:
        raise ValueError(f"{items.size} values need as many groups, got {len(groups)}")
    numbers: dict[Hashable, int] = {}
    place = [numbers.setdefault(group, len(numbers)) for group in groups]
    return np.bincount(place, weights=items), np.bincount(place).astype(np.float64)


def _resampled_means(
    totals: np.ndarray, counts: np.ndarray, resamples: int, seed: int
) -> Iterator[np.ndarray]:
    """Means of `resamples` draws of cases with replacement, a bounded number at a time."""
    random = np.random.default_rng(seed)
    at_once = max(1, _DRAWS_AT_ONCE // totals.size)
    for start in range(0, resamples, at_once):
        rows = min(at_once, resamples - start)
        drawn = random.integers(totals.size, size=(rows, totals.size))
        yield totals[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
