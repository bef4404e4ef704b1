"""Paired comparison of variants with a baseline: tests, intervals, verdicts. Sees DataFrames, knows no model.

A verdict is built to be believed at 3 to 10 seeds, whatever the shape of the scores. Three choices follow.

*Two tests, the larger p.* The paired t alone stars too often at few seeds on bimodal or few-level scores;
the exact sign-flip test does not, but takes any constant difference for a sure one. A difference must
convince both, and differences without variance convince nobody (p = 1). Holm then covers the study's
variants × tasks.

*Ties at an end of the scale prove nothing.* TOST reads the spread of the differences. Where both arms sit
at an end of the scale there is none to read: a variant that fails in one seed of twenty mostly looks
perfect, and two variants that learned nothing look alike. Such a comparison is *undecided*, with a
Clopper–Pearson bound on the rate of pairs that do not tie (`ceilings`); a harder or an easier setting
decides it, not more seeds. Away from the ends nothing gives rare failures away: *equivalent* there speaks
of what the seeds have shown.

*Undecided says what it would take.* `seeds_needed` is a plan, not a promise: it keeps the effect as observed.
"""

from __future__ import annotations

import bisect
import difflib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy import special

from harness.schema import UserError

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.intp]

MOST_SEEDS = 10_000
"""The cap on `seeds_needed`: read it as "this many or more"."""

_ROUNDING = 4 * float(np.finfo(np.float32).eps)  # relative: scores may have passed through single precision
_SMALLEST, _LARGEST = 1e-100, 1e100  # beyond these a square leaves the range of a float
_EXACT_PAIRS = 32  # two halves of 2^16 sums: milliseconds
_DRAWS, _DRAWS_A_BLOCK = 19_999, 1_000


def compare(
    scores: pd.DataFrame,
    baseline: str,
    margin: float,
    higher_is_better: bool = True,
    alpha: float = 0.05,
    against: Mapping[str, str] | None = None,
) -> pd.DataFrame:
    """Compare each variant with the baseline on each task, paired by seed.

    Args:
        scores: One study, a row a run: `variant, task, seed, score`. Without `task` there is one task,
            named "". A pair is a seed for which both arms have a finite score; the others (NaN, infinite,
            absent) are left out, which `n_pairs` shows. If all scores lie in [0, 1], those are taken for
            the ends of the scale.
        baseline: The variant that the others are compared with.
        margin: The largest difference that does not matter, in units of the score.
        higher_is_better: Turns *better* and *worse* around; it changes no number.
        alpha: The family-wise error rate of *better* and *worse*; the error rate a row of *equivalent*.
        against: For some variants, which other one they are compared with instead of the baseline.

    Returns:
        A row for every other variant and every task, in order of first appearance; no value depends on the
        order. A baseline alone, or no rows at all, gives an empty frame with the same columns and types.

        - `variant`, `task`: strings.
        - `n_pairs`: seeds compared.
        - `difference`: mean of variant − baseline, in units of the score. NaN without a pair.
        - `low`, `high`: its 1 − α paired-t interval, for this row alone. NaN below two pairs. Without
          variance both equal `difference`, and say nothing about what further seeds may bring.
        - `p`: the larger of the two-sided paired-t and sign-flip p. 1 below two pairs or without variance.
        - `p_holm`: Holm's correction over all rows. Rows that cannot be tested count (p = 1); variants or
          tasks that do not occur in `scores`, as early in a study, cannot.
        - `effect_size`: Hedges' g of the differences, J(n − 1) · mean / standard deviation with
          J(m) = Γ(m/2) / (√(m/2) Γ((m − 1)/2)). NaN below three pairs (J(1) = 0) or without variance.
        - `verdict`: *better* or *worse* if p_holm ≤ α, however small the difference, whose size and
          interval stand beside it. Else *equivalent* if shown, uncorrected for other rows, by TOST (the
          1 − 2α interval lies inside the margin); never where at least half of the pairs tie (see
          `ceilings`), and never with 2^−n > α (below 5 pairs at .05), when a mode that holds half of the
          pairs may not have been met yet. Else *undecided*.
        - `seeds_needed`: `n_pairs` if decided. Else the fewest pairs with which some verdict is in reach if
          mean, spread and the share of zero differences stay as they are and no further pair breaks a tie.
          More than `n_pairs`; at least the fewest with which a difference can be significant after
          correction for all rows (6, 8, 9 for 1, 5, 10 rows at α = .05); at most `MOST_SEEDS`.

    Raises:
        UserError: A column is missing, a row lacks a name or seed, a run appears twice, the baseline (or
            another that a variant is compared with) is not there, `margin` is negative or not finite, `alpha` is
            outside (0, .5).

    Sources: Holm 1979; Hedges 1981; Schuirmann 1987 (TOST); Clopper and Pearson 1934; Phipson and Smyth 2010
    (arXiv:1603.05766) for the p of sampled permutations.
    """
    rows = [_summarise(arms, margin) for arms in _pair(scores, baseline, margin, alpha, against)]
    return _table(rows, holm([row.p for row in rows]), margin, higher_is_better, alpha)


def compare_in_turn(
    scores: pd.DataFrame,
    baseline: str,
    margin: float,
    looks: Sequence[int],
    higher_is_better: bool = True,
    alpha: float = 0.05,
    against: Mapping[str, str] | None = None,
    ended: Mapping[tuple[str, str], int] | None = None,
) -> pd.DataFrame:
    """Compare after the first `looks[0]` seeds, then after `looks[1]`, and so on, until each comparison is decided.

    Seeds are those of `scores` in order. Each look spends the same share of α, α / len(looks): a comparison is decided
    at the first look where `compare`'s tests say so at that level, and what further seeds show changes it no more.
    Holm's correction at a look counts the comparisons that earlier looks found *better* or *worse* as rejected, so
    that their share passes on, and those found *equivalent* as not to be rejected (Maurer and Bretz 2013, for group
    sequential tests). The family-wise error of *better* and *worse* over all looks stays below α, because no look
    spends more than its share; looking several times makes *equivalent* no more often wrong than `compare` is.

    `ended` says of (variant, task) how many of the first seeds have ended, whatever became of them; all, where it says
    nothing. A look that is not complete for both arms of a comparison decides nothing about it: it stays *undecided*.

    Returns and raises what `compare` does. `p_holm` is also multiplied by the number of looks, so that it stands
    against α as ever. A further column, `looked`, is the number of seeds at the last look that the row had.
    """
    if not looks or list(looks) != sorted(set(looks)) or looks[0] < 1:
        raise UserError(f"looks: must be increasing numbers of seeds, not {list(looks)}.")
    _pair(scores, baseline, margin, alpha, against)  # what is wrong with any of the scores is said at once
    order = np.sort(scores["seed"].unique())
    settled: dict[tuple[str, str], Any] = {}  # rows of a table
    table = pd.DataFrame()
    for seeds in looks:
        seen = scores[scores["seed"].isin(order[:seeds])]
        rows = [_summarise(arms, margin) for arms in _pair(seen, baseline, margin, alpha, against)]
        before = [settled.get((row.arms.variant, row.arms.task)) for row in rows]
        waits = [not _complete(row.arms, seeds, ended or {}) for row in rows]
        p = [
            (1.0 if waiting else row.p) if past is None else float(past["verdict"] == "equivalent")
            for row, past, waiting in zip(rows, before, waits, strict=True)
        ]
        corrected = np.minimum(1.0, holm(p) * len(looks))
        table = _table(rows, corrected, margin, higher_is_better, alpha, looks=len(looks)).assign(looked=seeds)
        for index, past in enumerate(before):
            if past is not None:
                table.loc[index] = past
            elif waits[index]:
                table.loc[index, "verdict"] = "undecided"
            elif table.at[index, "verdict"] != "undecided":
                settled[rows[index].arms.variant, rows[index].arms.task] = table.loc[index].copy()
        if len(settled) == len(rows) or seeds >= len(order):
            break
    return table


def _complete(arms: _Arms, seeds: int, ended: Mapping[tuple[str, str], int]) -> bool:
    """Whether both arms of a comparison have ended for so many seeds."""
    return all(ended.get((variant, arms.task), seeds) >= seeds for variant in (arms.variant, arms.reference))


def _table(
    rows: list[_Row], corrected: Floats, margin: float, higher_is_better: bool, alpha: float, *, looks: int = 1
) -> pd.DataFrame:
    """What `compare` returns, of comparisons whose corrected p is known and that are tested so many times."""
    tested = zip(rows, corrected, strict=True)
    verdicts = [_verdict(row, p_holm, margin, higher_is_better, alpha, looks) for row, p_holm in tested]
    needed = [
        row.n if verdict != "undecided" else _seeds_needed(row, len(rows), margin, alpha, looks)
        for row, verdict in zip(rows, verdicts, strict=True)
    ]
    half_widths = np.array([_half_width(row.spread, row.n, alpha / 2) for row in rows], dtype=np.float64)
    differences = np.array([row.mean for row in rows], dtype=np.float64)
    return pd.DataFrame(
        {
            "variant": pd.Series([row.arms.variant for row in rows], dtype="str"),
            "task": pd.Series([row.arms.task for row in rows], dtype="str"),
            "n_pairs": np.array([row.n for row in rows], dtype=np.int64),
            "difference": differences,
            "low": differences - half_widths,
            "high": differences + half_widths,
            "p": np.array([row.p for row in rows], dtype=np.float64),
            "p_holm": corrected,
            "effect_size": np.array([_hedges_g(row) for row in rows], dtype=np.float64),
            "verdict": pd.Series(verdicts, dtype="str"),
            "seeds_needed": np.array(needed, dtype=np.int64),
        }
    )


def contrasts(
    scores: pd.DataFrame,
    weights: Mapping[str, Mapping[str, float]],
    margin: float,
    higher_is_better: bool = True,
    alpha: float = 0.05,
    looks: int = 1,
) -> pd.DataFrame:
    """Test weighted sums of variants, seed by seed: main effects and interactions of a factorial study.

    `weights` gives each contrast the weights of its variants, which sum to zero: {a: 1, b: −1} is what `compare` tests;
    {ab: 1, a: −1, b: −1, none: 1} is an interaction, how far two changes together differ from the sum of each alone. A
    seed counts where every variant of the contrast has a score. Ties, tests, verdicts, corrections over all contrasts ×
    tasks: those of `compare`, and so are the columns, `variant` being the contrast. Scores of a study that stopped at
    one of several `looks` are tested with that look's share of α, as in `compare_in_turn`.

    Raises:
        UserError: as `compare`; a variant that no score belongs to; weights that do not sum to zero, or are all zero.
    """
    _check_terms(scores, margin, alpha)
    if scores.empty or not weights:
        return _table([], holm([]), margin, higher_is_better, alpha)
    variants, tasks, grid = _grid(scores)
    has_ends, rows = _has_ends(grid), []
    for name, of in weights.items():
        size = sum(weight for weight in of.values() if weight > 0)
        if size == 0 or abs(sum(of.values())) > 1e-9:
            raise UserError(f"contrasts.{name}: its weights must sum to zero and not all be zero, not {dict(of)}.")
        arm = {
            _index(variants, variant, f"contrasts.{name}"): weight / size for variant, weight in of.items() if weight
        }
        for j, task in enumerate(tasks):
            scored = ~np.isnan(grid[list(arm), j]).any(axis=0)
            ours = sum((w * grid[i, j, scored] for i, w in arm.items() if w > 0), start=np.zeros(int(scored.sum())))
            theirs = sum((-w * grid[i, j, scored] for i, w in arm.items() if w < 0), start=np.zeros(int(scored.sum())))
            row = _summarise(_Arms(name, "", task, ours, theirs, has_ends), margin / size)
            rows.append(replace(row, mean=row.mean * size, spread=row.spread * size, tied_mean=row.tied_mean * size))
    corrected = np.minimum(1.0, holm([row.p for row in rows]) * looks)
    return _table(rows, corrected, margin, higher_is_better, alpha, looks=looks)


def ceilings(
    scores: pd.DataFrame,
    baseline: str,
    margin: float,
    alpha: float = 0.05,
    against: Mapping[str, str] | None = None,
) -> pd.DataFrame:
    """The comparisons in which at least half of the pairs tie, and what they leave open.

    A pair ties if its scores are equal, or if both lie within half a margin of the same end of [0, 1]: there
    they cannot differ by more, however much the arms do.

    Returns a row for each such comparison: `variant`, `task`, `n_pairs`, `ties`, `failure_bound` (the
    one-sided Clopper–Pearson bound: with probability 1 − α the rate of pairs that do not tie is below it)
    and `sentence`, the same for a reader. Arguments and errors are those of `compare`.
    """
    rows = [_summarise(arms, margin) for arms in _pair(scores, baseline, margin, alpha, against)]
    rows = [row for row in rows if row.at_ceiling]
    bounds = [_failure_bound(row.n - row.ties, row.n, alpha) for row in rows]
    sentences = [
        f"{row.ties} of {row.n} pairs tie{row.place}: up to {bound:.0%} of seeds may still differ "
        f"(Clopper–Pearson, one-sided {1 - alpha:.0%})."
        for row, bound in zip(rows, bounds, strict=True)
    ]
    return pd.DataFrame(
        {
            "variant": pd.Series([row.arms.variant for row in rows], dtype="str"),
            "task": pd.Series([row.arms.task for row in rows], dtype="str"),
            "n_pairs": np.array([row.n for row in rows], dtype=np.int64),
            "ties": np.array([row.ties for row in rows], dtype=np.int64),
            "failure_bound": np.array(bounds, dtype=np.float64),
            "sentence": pd.Series(sentences, dtype="str"),
        }
    )


def sign_flip_p(differences: npt.ArrayLike) -> float:
    """Two-sided p of the sign-flip test: how often is |Σ ±d_i| at least the |Σ d_i| seen?

    Each of the 2^n sign patterns is equally likely if the two arms of a pair can be exchanged. Exact up to 32
    non-zero differences: the sums of one half are looked up among the sorted sums of the other (Horowitz and
    Sahni 1974). Beyond, p = (1 + hits) / 20 000 with 19 999 patterns drawn from a fixed seed, which keeps the
    level. Sums within rounding of the one seen are hits. 1 without a difference. Differences must be finite.
    """
    given = np.asarray(differences, dtype=np.float64)
    sizes = np.sort(np.abs(given[given != 0]))
    threshold = abs(float(given.sum())) - _ROUNDING * float(sizes.sum())
    if threshold <= 0:
        return 1.0
    if sizes.size > _EXACT_PAIRS:
        return _sampled_flip_p(sizes, threshold)
    first, second = _signed_sums(sizes[::2]), _signed_sums(sizes[1::2])
    hits = second.size * first.size - int(np.searchsorted(second, threshold - first[::-1]).sum())
    return min(1.0, 2 * hits / 2.0**sizes.size)  # the sums are symmetric around zero


def holm(p_values: npt.ArrayLike) -> Floats:
    """Holm's step-down correction: the i-th smallest of m becomes max_{j ≤ i} (m − j + 1) p_j, at most 1."""
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(1.0, np.maximum.accumulate(p[order] * np.arange(p.size, 0, -1)))
    return corrected


def false_discovery(p_values: npt.ArrayLike) -> Floats:
    """Benjamini and Hochberg's step-up correction: the i-th smallest of m becomes min_{j ≥ i} m p_j / j, at most 1.

    Of the differences that are at most α, an α-th is expected to be none, where tests are independent or depend on each
    other positively (1995); of two-sided tests of correlated means, too (Reiner-Benaim 2007).
    """
    p = np.asarray(p_values, dtype=np.float64)
    order = np.argsort(p, kind="stable")[::-1]
    corrected = np.empty_like(p)
    corrected[order] = np.minimum(1.0, np.minimum.accumulate(p[order] * p.size / np.arange(p.size, 0, -1)))
    return corrected


def clopper_pearson(failures: int, n: int, alpha: float = 0.05) -> tuple[float, float]:
    """Exact two-sided 1 − α interval of a rate, from `failures` in `n`; (0, 1) if n is 0.

    low = Beta(α/2; k, n − k + 1), high = Beta(1 − α/2; k + 1, n − k). Its upper end at 2α is the one-sided
    bound at α: 0 in 59 bounds a rate by .05. UserError unless 0 ≤ failures ≤ n.
    """
    if not 0 <= failures <= n:
        raise UserError(f"clopper_pearson: failures must lie between 0 and n = {n}, not {failures}.")
    low = 0.0 if failures == 0 else float(special.betaincinv(failures, n - failures + 1, alpha / 2))
    high = 1.0 if failures == n else float(special.betaincinv(failures + 1, n - failures, 1 - alpha / 2))
    return low, high


def fewest_seeds(comparisons: int, alpha: float = 0.05) -> int:
    """The fewest pairs whose smallest sign-flip p, 2 / 2^n, survives Holm's correction for so many comparisons."""
    return 1 + math.ceil(math.log2(max(1, comparisons) / alpha))


def summary_interval(values: npt.ArrayLike, alpha: float = 0.05) -> tuple[float, float, float]:
    """Mean and its 1 − α t interval, (mean, low, high), over the finite values.

    All NaN without a value, low and high NaN with one or two: of two the interval is ±12.7 times their half distance,
    wider than most scales. It may leave the scale: a t interval knows no ends.
    """
    usable = _drop_unusable(np.asarray(values, dtype=np.float64))
    usable = usable[~np.isnan(usable)]
    mean = float(usable.mean()) if usable.size > 0 else math.nan
    spread = float(usable.std(ddof=1)) if usable.size > 2 else math.nan
    half_width = _half_width(spread, usable.size, alpha / 2)
    return mean, mean - half_width, mean + half_width


# Pairing


@dataclass(frozen=True, slots=True)
class _Arms:
    """The scores of one variant and of what it is compared with on one task, seed by seed."""

    variant: str
    reference: str  # empty of a contrast, which has several
    task: str
    ours: Floats  # (n_pairs,)
    theirs: Floats  # (n_pairs,)
    has_ends: bool  # the study's scores lie in [0, 1]


def _pair(
    scores: pd.DataFrame, baseline: str, margin: float, alpha: float, against: Mapping[str, str] | None
) -> list[_Arms]:
    """The arms of every comparison of a study; checks everything a user can get wrong."""
    _check_terms(scores, margin, alpha)
    if scores.empty:
        return []

    variants, tasks, grid = _grid(scores)
    first = _index(variants, str(baseline), "baseline")
    others = {name: _index(variants, other, f"against.{name}") for name, other in (against or {}).items()}
    for name in others:
        _index(variants, name, "against")
    has_ends = _has_ends(grid)

    arms = []
    for i, variant in enumerate(variants):
        reference = others.get(variant, first)
        for j, task in enumerate(tasks):
            paired = ~np.isnan(grid[i, j]) & ~np.isnan(grid[reference, j])
            if i != first:
                ours, theirs = grid[i, j, paired], grid[reference, j, paired]
                arms.append(_Arms(variant, variants[reference], task, ours, theirs, has_ends))
    return arms


def _check_terms(scores: pd.DataFrame, margin: float, alpha: float) -> None:
    if not (math.isfinite(margin) and margin >= 0):
        raise UserError(f"margin: must be a finite number of at least 0, not {margin}.")
    if not 0 < alpha < 0.5:
        raise UserError(f"alpha: must lie between 0 and .5, not {alpha}.")
    absent = [name for name in ("variant", "seed", "score") if name not in scores.columns]
    if absent:
        there = ", ".join(map(str, scores.columns))
        raise UserError(f"scores: column {absent[0]!r} is missing; it has {there or 'none'}.")


def _has_ends(grid: Floats) -> bool:
    return not bool(((grid < 0) | (grid > 1)).any())


def _index(variants: list[str], name: str, asked_by: str) -> int:
    if name not in variants:
        near = difflib.get_close_matches(name, variants, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(variants)}."
        raise UserError(f"{asked_by}: no score belongs to a variant {name!r}; {hint}")
    return variants.index(name)


def _grid(scores: pd.DataFrame) -> tuple[list[str], list[str], Floats]:
    """Names of variants and tasks; scores as (variants, tasks, seeds), NaN where there is none to use."""
    variant, variants = _codes(scores, "variant")
    seed, seeds = _codes(scores, "seed", in_order=True)  # a sum's last bit depends on the order of its terms
    task, tasks = _codes(scores, "task") if "task" in scores.columns else (np.zeros_like(variant), [""])
    try:
        values = scores["score"].to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError) as error:
        raise UserError(f"scores: column 'score' must hold numbers ({error}).") from error

    shape = (len(variants), len(tasks), len(seeds))
    cells = (variant * shape[1] + task) * shape[2] + seed
    occupied, first = np.unique(cells, return_index=True)
    if occupied.size < cells.size:
        row = int(np.setdiff1d(np.arange(cells.size), first)[0])
        where = f"variant {variants[variant[row]]!r}, task {tasks[task[row]]!r}, seed {seeds[seed[row]]}"
        raise UserError(f"scores: {where} appears more than once; keep one row a run.")
    grid = np.full(math.prod(shape), np.nan)
    grid[cells] = _drop_unusable(values)
    return variants, tasks, grid.reshape(shape)


def _codes(scores: pd.DataFrame, column: str, *, in_order: bool = False) -> tuple[Integers, list[str]]:
    codes, names = pd.factorize(scores[column], sort=in_order)
    if (codes < 0).any():
        row = int(np.argmax(codes < 0))
        raise UserError(f"scores: row {row} has no {column}; every score needs one.")
    return codes, [str(name) for name in names]


def _drop_unusable(values: Floats) -> Floats:
    return np.where(np.abs(values) < _LARGEST, values, np.nan)  # NaN compares false and stays NaN


# One comparison


@dataclass(frozen=True, slots=True)
class _Row:
    """What the verdict on one comparison rests on."""

    arms: _Arms
    n: int
    mean: float  # of the differences; NaN if n = 0
    spread: float  # their standard deviation; 0 within rounding, NaN if n < 2
    p: float
    nonzero: int  # differences that are not zero
    ties: int
    tied_mean: float  # mean difference of the tied pairs
    place: str  # where they tie, for a reader

    @property
    def at_ceiling(self) -> bool:
        return self.n > 0 and 2 * self.ties >= self.n


def _summarise(arms: _Arms, margin: float) -> _Row:
    differences = arms.ours - arms.theirs
    n = differences.size
    if n == 0:
        return _Row(arms, 0, math.nan, math.nan, 1.0, 0, 0, 0.0, "")
    largest = float(max(np.abs(arms.ours).max(), np.abs(arms.theirs).max()))
    rounding = max(_ROUNDING * largest, _SMALLEST)
    zero = np.abs(differences) <= rounding

    zone = margin / 2
    top = arms.has_ends & (arms.ours >= 1 - zone) & (arms.theirs >= 1 - zone)
    bottom = arms.has_ends & (arms.ours <= zone) & (arms.theirs <= zone)
    tied = top | bottom | zero
    end = "top" if top[tied].all() else "bottom" if bottom[tied].all() else ""

    mean, spread, p = float(differences.mean()), math.nan, 1.0
    if n > 1:
        spread = float(differences.std(ddof=1)) if np.ptp(differences) > rounding else 0.0
    if spread > 0:  # false for NaN
        p = max(_paired_t_p(mean, spread, n), sign_flip_p(differences))
    return _Row(
        arms=arms,
        n=n,
        mean=mean,
        spread=spread,
        p=p,
        nonzero=n - int(zero.sum()),
        ties=int(tied.sum()),
        tied_mean=float(differences[tied].mean()) if tied.any() else 0.0,
        place=f" at the {end} of the scale" if end else "",
    )


def _verdict(row: _Row, p_holm: float, margin: float, higher_is_better: bool, alpha: float, looks: int) -> str:
    if p_holm <= alpha:
        return "better" if (row.mean > 0) == higher_is_better else "worse"
    return "equivalent" if _shows_equivalence(row, row.n, margin, alpha / looks) else "undecided"


def _shows_equivalence(row: _Row, n: int, margin: float, alpha: float) -> bool:
    """Would n pairs with this mean, spread and number of untied pairs show that the arms are equivalent?"""
    if n < 2 or 2.0**-n > alpha:
        return False
    if row.at_ceiling:
        return False
    return row.spread > 0 and abs(row.mean) + _half_width(row.spread, n, alpha) < margin


def _shows_difference(row: _Row, n: int, rows: int, alpha: float) -> bool:
    """Would n pairs with this mean, spread and share of zeros be significant, corrected for all rows?"""
    if n * row.nonzero < row.n * fewest_seeds(rows, alpha):
        return False
    return row.spread == 0 or rows * _paired_t_p(row.mean, row.spread, n) <= alpha


def _seeds_needed(row: _Row, rows: int, margin: float, alpha: float, looks: int) -> int:
    fewest = max(row.n + 1, fewest_seeds(rows, alpha / looks))
    if row.n < 2:
        return min(fewest, MOST_SEEDS)
    for_difference = _first(lambda n: _shows_difference(row, n, rows, alpha / looks), fewest)
    for_equivalence = _first(lambda n: _shows_equivalence(row, n, margin, alpha / looks), fewest)
    return min(for_difference, for_equivalence)


def _first(shown: Callable[[int], bool], fewest: int) -> int:
    """The smallest number from `fewest` on at which `shown` holds, and then always; at most MOST_SEEDS."""
    candidates: Sequence[int] = range(fewest, MOST_SEEDS)
    return min(fewest + bisect.bisect_left(candidates, True, key=shown), MOST_SEEDS)


# Formulas


def _paired_t_p(mean: float, spread: float, n: int) -> float:
    return float(2 * special.stdtr(n - 1, -abs(mean) * math.sqrt(n) / spread))


def _half_width(spread: float, n: int, tail: float) -> float:
    """Half of the t interval of a mean that leaves `tail` out on either side; NaN below two values."""
    return float(special.stdtrit(n - 1, 1 - tail)) * spread / math.sqrt(n) if n > 1 else math.nan


def _hedges_g(row: _Row) -> float:
    if row.n < 3 or row.spread == 0:
        return math.nan  # at two pairs the correction is zero: E[1 / s] does not exist
    m = row.n - 1
    shrink = math.exp(math.lgamma(m / 2) - math.lgamma((m - 1) / 2)) / math.sqrt(m / 2)
    return shrink * row.mean / row.spread


def _failure_bound(failures: int, n: int, alpha: float) -> float:
    return clopper_pearson(failures, n, 2 * alpha)[1]


def _signed_sums(sizes: Floats) -> Floats:
    """All 2^n sums of +-sizes, in order: merged as they grow, and looked up in order, which takes half the time."""
    sums = np.zeros(1)
    for size in sizes:
        sums = np.sort(np.concatenate((sums - size, sums + size)), kind="stable")
    return sums


def _sampled_flip_p(sizes: Floats, threshold: float) -> float:
    generator = np.random.default_rng(0)
    hits = 0
    for start in range(0, _DRAWS, _DRAWS_A_BLOCK):
        draws = min(_DRAWS_A_BLOCK, _DRAWS - start)
        signs = generator.integers(0, 2, size=(draws, sizes.size), dtype=np.int8)
        sums = (2.0 * signs - 1.0) @ sizes
        hits += int(np.count_nonzero(np.abs(sums) >= threshold))
    return (1 + hits) / (1 + _DRAWS)
