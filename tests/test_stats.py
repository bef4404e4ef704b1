"""Laws of the comparison, independent references for its numbers, and its error rates by simulation."""

import math
import time

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from pandas.testing import assert_frame_equal

from harness.schema import UserError
from harness.stats import (
    MOST_SEEDS,
    ceilings,
    clopper_pearson,
    compare,
    compare_in_turn,
    contrasts,
    fewest_seeds,
    holm,
    sign_flip_p,
    summary_interval,
)

NUMBERS = ["n_pairs", "difference", "low", "high", "p", "p_holm", "effect_size", "seeds_needed"]
COLUMNS = ["variant", "task", *NUMBERS[:-1], "verdict", "seeds_needed"]
law = settings(max_examples=30)


def study(arms, tasks=("copy",)):
    """The long table of {variant: scores}, seeds 0, 1, …; the same scores on every task."""
    rows = [
        (variant, task, seed, score)
        for task in tasks
        for variant, scores in arms.items()
        for seed, score in enumerate(scores)
    ]
    return pd.DataFrame(rows, columns=["variant", "task", "seed", "score"])


def only(table):
    assert len(table) == 1
    return table.iloc[0]


def noisy(seed, mean, spread=0.02, seeds=8):
    return np.random.default_rng(seed).normal(mean, spread, seeds)


# Drawn studies: a baseline and one to three variants, two tasks, 2 to 9 seeds, some scores missing. A grid of
# scores keeps sums exact and ties frequent.
levels = st.integers(0, 16).map(lambda k: k / 16)
grids = st.tuples(st.integers(2, 4), st.integers(2, 9)).flatmap(
    lambda size: st.lists(
        st.lists(st.one_of(levels, levels, levels, st.just(math.nan)), min_size=size[1], max_size=size[1]),
        min_size=2 * size[0],
        max_size=2 * size[0],
    )
)


def drawn(grid):
    names = [f"v{i}" for i in range(len(grid) // 2)]
    copy, reverse = (dict(zip(names, grid[k::2], strict=True)) for k in (0, 1))
    return pd.concat([study(copy, ("copy",)), study(reverse, ("reverse",))], ignore_index=True)


# References


@law
@given(st.lists(st.integers(-8, 8), min_size=1, max_size=10))
def test_sign_flip_p_counts_all_sign_patterns(integers):
    differences = np.array(integers, dtype=float)
    patterns = np.array(np.meshgrid(*[[-1, 1]] * len(integers))).reshape(len(integers), -1)
    expected = np.mean(np.abs(differences @ patterns) >= abs(differences.sum()))
    assert sign_flip_p(differences) == expected
    assert sign_flip_p(-differences) == expected


@pytest.mark.parametrize("n", [3, 8, 12])
def test_sign_flip_p_is_scipys(n):
    differences = noisy(n, 0.3, 1.0, n)
    theirs = scipy.stats.permutation_test(
        (differences,),
        lambda x, axis: x.sum(axis),
        permutation_type="samples",
        n_resamples=np.inf,
        vectorized=True,
    )
    assert sign_flip_p(differences) == pytest.approx(theirs.pvalue, abs=1e-12)


def test_sign_flip_p_sees_through_single_precision():
    exact = np.array([0.3, 0.5, 0.1, 0.2, -0.1, -0.2, 0.4])
    assert sign_flip_p(exact.astype(np.float32)) == sign_flip_p((exact * 10).round())


@pytest.mark.parametrize("n", [33, 100])
def test_sampled_sign_flips_agree_with_the_t_distribution_and_never_give_zero(n):
    differences = noisy(n, 0.25, 1.0, n)
    assert sign_flip_p(differences) == pytest.approx(scipy.stats.ttest_1samp(differences, 0).pvalue, abs=0.02)
    assert sign_flip_p(differences) == sign_flip_p(differences[::-1])
    assert sign_flip_p(np.ones(n)) == 1 / 20_000


def test_sampling_starts_where_enumeration_ends():
    differences = noisy(4, 0.3, 1.0, 32)
    with_a_speck = np.append(differences, 1e-12)
    assert sign_flip_p(with_a_speck) == pytest.approx(sign_flip_p(differences), abs=0.01)


def test_holm_by_hand():
    # Sorted .01 .02 .03 .04 times 4 3 2 1 is .04 .06 .06 .04; the running maximum lifts the last.
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.7]) == pytest.approx([1.0, 1.0])
    assert holm([]).shape == (0,)


@law
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.floats(0.01, 0.2))
def test_holm_rejects_what_the_step_down_procedure_rejects(p, alpha):
    rejected = []
    for step, index in enumerate(np.argsort(p, kind="stable")):
        if p[index] * (len(p) - step) > alpha:
            break
        rejected.append(index)
    assert sorted(rejected) == list(np.flatnonzero(holm(p) <= alpha))


@pytest.mark.parametrize("draw", range(6))  # in some the t test has the larger p, in some the sign flips
def test_the_numbers_of_a_row_are_scipys(draw):
    ours, theirs = noisy(draw, 0.7, 0.1, 10), noisy(99, 0.6, 0.1, 10)
    row = only(compare(study({"base": theirs, "new": ours}), "base", 0.05))
    t = scipy.stats.ttest_rel(ours, theirs)
    interval = t.confidence_interval(0.95)
    assert row.n_pairs == 10
    assert row.difference == pytest.approx(np.mean(ours - theirs))
    assert (row.low, row.high) == pytest.approx((interval.low, interval.high))
    assert row.p == row.p_holm == pytest.approx(max(t.pvalue, sign_flip_p(ours - theirs)))
    assert row.effect_size == pytest.approx(t.statistic / math.sqrt(10) * (1 - 3 / (4 * 9 - 1)), rel=1e-3)


@pytest.mark.parametrize("failures", [0, 1, 3, 7])
def test_clopper_pearson_is_scipys(failures):
    theirs = scipy.stats.binomtest(failures, 7).proportion_ci(0.9, method="exact")
    assert clopper_pearson(failures, 7, 0.1) == pytest.approx((theirs.low, theirs.high))


def test_bounding_a_rate_by_a_twentieth_takes_59_clean_runs():
    assert clopper_pearson(0, 59, 0.1)[1] < 0.05 < clopper_pearson(0, 58, 0.1)[1]
    assert clopper_pearson(0, 0) == (0, 1)
    with pytest.raises(UserError, match="failures"):
        clopper_pearson(3, 2)


def test_summary_interval_is_the_t_interval():
    values = noisy(3, 0.5, 0.1, 6)
    theirs = scipy.stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert summary_interval([*values, math.nan]) == pytest.approx((values.mean(), theirs.low, theirs.high))
    assert summary_interval([]) == pytest.approx((math.nan,) * 3, nan_ok=True)
    assert summary_interval([0.25]) == pytest.approx((0.25, math.nan, math.nan), nan_ok=True)
    assert summary_interval([0.25, 0.75]) == pytest.approx((0.5, math.nan, math.nan), nan_ok=True)


# Laws


@law
@given(grids)
def test_every_row_is_well_formed(grid):
    scores = drawn(grid)
    table = compare(scores, "v0", 0.1)
    assert list(table.columns) == COLUMNS
    assert len(table) == 2 * (scores.variant.nunique() - 1)
    assert table.p.between(0, 1).all()
    assert (table.p_holm >= table.p).all()
    assert (table.p_holm <= 1).all()
    tested = table[table.n_pairs > 1]
    assert (tested.low <= tested.difference).all()
    assert (tested.difference <= tested.high).all()
    assert table[table.n_pairs < 2][["low", "high", "effect_size"]].isna().all(axis=None)
    undecided = table.verdict == "undecided"
    assert (table.seeds_needed[undecided] > table.n_pairs[undecided]).all()
    assert (table.seeds_needed[~undecided] == table.n_pairs[~undecided]).all()


@law
@given(grids, st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(grid, random):
    scores = drawn(grid)
    order = list(range(len(scores)))
    random.shuffle(order)
    shuffled = compare(scores.iloc[order], "v0", 0.1)
    by_name = ["variant", "task"]
    assert_frame_equal(
        shuffled.sort_values(by_name, ignore_index=True),
        compare(scores, "v0", 0.1).sort_values(by_name, ignore_index=True),
        check_exact=True,
    )


def test_not_even_the_last_bit_depends_on_the_order_of_rows():
    scores = study({"base": noisy(0, 0.5), "new": noisy(1, 0.6)})
    for draw in range(5):
        shuffled = scores.sample(frac=1, random_state=draw)
        assert_frame_equal(compare(shuffled, "base", 0.05), compare(scores, "base", 0.05), check_exact=True)


@law
@given(grids)
def test_names_do_not_matter(grid):
    scores = drawn(grid)
    renamed = scores.assign(variant="z" + scores.variant.str[::-1], seed=99 - scores.seed)
    again = compare(renamed, "z0v", 0.1)
    expected = compare(scores, "v0", 0.1)
    assert list(again.verdict) == list(expected.verdict)
    assert_frame_equal(again[NUMBERS], expected[NUMBERS])


@law
@given(grids, st.integers(-4, 4))
def test_shifting_both_arms_changes_no_number(grid, shift):
    scores = drawn(grid)
    numbers = ["n_pairs", "difference", "low", "high", "p", "p_holm", "effect_size"]
    shifted = compare(scores.assign(score=scores.score + shift), "v0", 0.1)
    assert_frame_equal(shifted[numbers], compare(scores, "v0", 0.1)[numbers])


@law
@given(grids)
def test_swapping_the_arms_mirrors_the_row(grid):
    scores = drawn([*grid[:4]])
    there, back = compare(scores, "v0", 0.1), compare(scores, "v1", 0.1)
    assert np.array_equal(there.difference, -back.difference, equal_nan=True)
    assert np.array_equal(there.low, -back.high, equal_nan=True)
    assert np.array_equal(there.effect_size, -back.effect_size, equal_nan=True)
    mirror = {"better": "worse", "worse": "better"}
    assert [mirror.get(verdict, verdict) for verdict in there.verdict] == list(back.verdict)
    same = ["n_pairs", "p", "p_holm", "seeds_needed"]
    assert_frame_equal(there[same], back[same])


@law
@given(grids)
def test_direction_only_turns_the_verdict_around(grid):
    scores = drawn(grid)
    high, low = compare(scores, "v0", 0.1), compare(scores, "v0", 0.1, higher_is_better=False)
    mirror = {"better": "worse", "worse": "better"}
    assert [mirror.get(verdict, verdict) for verdict in high.verdict] == list(low.verdict)
    assert_frame_equal(high.drop(columns="verdict"), low.drop(columns="verdict"))


# Verdicts


def test_a_large_difference_at_eight_seeds_is_seen_in_the_right_direction():
    arms = {"base": noisy(0, 0.5)} | {f"v{i}": noisy(i, 0.7) for i in range(1, 5)} | {"bad": noisy(9, 0.3)}
    table = compare(study(arms), "base", 0.05).set_index("variant").verdict
    assert set(table.drop("bad")) == {"better"}
    assert table["bad"] == "worse"
    reversed_table = compare(study(arms), "base", 0.05, higher_is_better=False).set_index("variant").verdict
    assert set(reversed_table.drop("bad")) == {"worse"}
    assert reversed_table["bad"] == "better"


@pytest.mark.parametrize(("rows", "fewest"), [(1, 6), (5, 8), (10, 9)])
def test_no_star_below_6_8_9_seeds_for_1_5_10_comparisons(rows, fewest):
    def verdicts(seeds):
        arms = {f"v{i}": noisy(i, 0.9, 0.01, seeds) for i in range(1, rows + 1)}
        return compare(study({"base": noisy(0, 0.5, 0.01, seeds)} | arms), "base", 0.05)

    assert set(verdicts(fewest).verdict) == {"better"}
    short = verdicts(fewest - 1)
    assert set(short.verdict) == {"undecided"}
    assert set(short.seeds_needed) == {fewest}
    assert set(verdicts(2).seeds_needed) == {fewest}


@pytest.mark.parametrize("rows", [1, 5])
def test_seeds_needed_is_where_the_effect_would_become_significant(rows):
    effect = 0.4 * np.array([1.5, -0.5])  # mean .2; repeated it keeps its mean and almost its spread

    def table(pairs):
        new = 0.3 + np.tile(effect, pairs // 2)
        arms = {"base": np.full(new.size, 0.3)} | {f"v{i}": new for i in range(rows)}
        return compare(study(arms), "base", 0.05)

    assert set(table(6).verdict) == {"undecided"}
    needed = table(6).seeds_needed[0] // 2 * 2
    assert set(table(needed - 2).verdict) == {"undecided"}
    assert set(table(needed + 2).verdict) == {"better"}


def test_equal_arms_with_little_noise_are_equivalent_and_a_wide_interval_is_not():
    arms = {"base": noisy(0, 0.5), "same": noisy(1, 0.5), "wide": noisy(2, 0.5, 0.2)}
    table = compare(study(arms), "base", 0.05).set_index("variant")
    assert table.verdict["same"] == "equivalent"
    assert table.verdict["wide"] == "undecided"
    assert table.seeds_needed["wide"] > 8


def test_equivalence_is_the_90_percent_interval_inside_the_margin():
    ours, theirs = noisy(1, 0.505), noisy(2, 0.5)
    interval = scipy.stats.ttest_rel(ours, theirs).confidence_interval(0.9)
    edge = max(-interval.low, interval.high)
    scores = study({"base": theirs, "new": ours})
    assert only(compare(scores, "base", edge * 1.001)).verdict == "equivalent"
    assert only(compare(scores, "base", edge * 0.999)).verdict == "undecided"


def test_a_significant_difference_wins_over_equivalence():
    scores = study({"base": noisy(0, 0.5, 0.001), "new": noisy(1, 0.51, 0.001)})
    row = only(compare(scores, "base", 0.05))
    assert row.verdict == "better"
    assert row.high < 0.05


@pytest.mark.parametrize("level", [1.0, 0.0, 0.5])
@pytest.mark.parametrize("seeds", [3, 8, 20, 100])
def test_tied_arms_are_undecided_with_a_bound(level, seeds):
    scores = study({"base": [level] * seeds, "new": [level] * seeds})
    row = only(compare(scores, "base", 0.05))
    assert (row.difference, row.p, row.verdict, row.seeds_needed) == (0, 1, "undecided", MOST_SEEDS)
    bound = only(ceilings(scores, "base", 0.05))
    assert bound.failure_bound == pytest.approx(1 - 0.05 ** (1 / seeds))
    assert f"{seeds} of {seeds} pairs tie" in bound.sentence


@law
@given(st.integers(1, 100), st.integers(0, 2**32 - 1), st.sampled_from([0, 1]))
def test_equivalence_is_never_given_at_a_noisy_end_of_the_scale(seeds, draw, end):
    random = np.random.default_rng(draw)
    arms = {name: abs(end - random.uniform(0, 0.05, seeds).round(3)) for name in ("base", "new")}
    assert only(compare(study(arms), "base", 0.1)).verdict != "equivalent"


def test_ties_of_scores_without_ends_are_undecided_too():
    steps = study({"base": [400.0] * 59, "new": [400.0] * 59})
    assert only(compare(steps, "base", 100)).verdict == "undecided"
    assert only(compare(steps, "base", 100)).seeds_needed == MOST_SEEDS


def test_the_same_difference_at_every_seed_is_no_evidence():
    scores = study({"base": [0.1, 0.2, 0.3, 0.4] * 3, "new": [0.4, 0.5, 0.6, 0.7] * 3})
    row = only(compare(scores, "base", 0.05))
    assert (row.p, row.verdict, row.seeds_needed) == (1, "undecided", 13)
    assert row.low == row.high == row.difference == pytest.approx(0.3)
    assert math.isnan(row.effect_size)
    assert only(compare(scores, "base", 0.4)).verdict == "undecided"
    single = scores.assign(score=scores.score.astype(np.float32))
    assert only(compare(single, "base", 0.05)).p == 1


# Incomplete and wrong input


def test_nan_infinite_and_absent_scores_drop_their_pair():
    scores = study({"base": [0.1, 0.2, 0.3, math.nan, 0.5], "new": [0.2, math.inf, 0.5, 0.6]})
    row = only(compare(scores, "base", 0.05))
    assert row.n_pairs == 2
    assert row.difference == pytest.approx(0.15)


def test_rows_that_cannot_be_tested_count_in_the_family():
    arms = {"base": noisy(0, 0.5), "new": noisy(1, 0.7)}
    alone = only(compare(study(arms), "base", 0.05))
    scores = study(arms | {"late": [0.6], "failed": [math.nan] * 8})
    table = compare(scores, "base", 0.05).set_index("variant")
    assert table.p_holm["new"] == pytest.approx(3 * alone.p)
    assert list(table.n_pairs) == [8, 1, 0]
    assert list(table.p[1:]) == [1, 1]
    assert list(table.verdict[1:]) == ["undecided"] * 2
    assert list(table.seeds_needed[1:]) == [7, 7]
    assert table.difference["late"] == pytest.approx(0.6 - arms["base"][0])
    assert math.isnan(table.difference["failed"])


def test_a_task_without_baseline_has_rows_without_pairs():
    scores = pd.concat([study({"base": [0.1], "new": [0.2]}), study({"new": [0.3]}, ("reverse",))])
    table = compare(scores, "base", 0.05)
    assert list(table.task) == ["copy", "reverse"]
    assert list(table.n_pairs) == [1, 0]


def test_without_a_task_column_the_task_is_empty():
    scores = study({"base": noisy(0, 0.5), "new": noisy(1, 0.7)})
    with_task = compare(scores, "base", 0.05)
    assert_frame_equal(compare(scores.drop(columns="task"), "base", 0.05), with_task.assign(task=""))


@pytest.mark.parametrize("arms", [{"base": [0.1, 0.2]}, {}])
def test_nothing_to_compare_is_an_empty_table_of_the_same_types(arms):
    full = compare(study({"base": [0.1], "new": [0.2]}), "base", 0.05)
    for function in (compare, ceilings):
        empty = function(study(arms), "base", 0.05)
        assert len(empty) == 0
        assert_frame_equal(empty, function(study({"base": [0.1], "new": [0.1]}), "base", 0.05).iloc[:0])
    assert list(full.columns) == COLUMNS
    assert [str(full[name].dtype) for name in ("n_pairs", "p", "seeds_needed")] == [
        "int64",
        "float64",
        "int64",
    ]


@law
@given(grids)
def test_a_comparison_with_another_than_the_baseline_is_the_one_that_has_it_as_baseline(grid):
    scores = drawn(grid)
    variants = list(dict.fromkeys(scores["variant"]))
    first, last = variants[0], variants[-1]
    by_hand = compare(scores, last, 0.1)
    named = compare(scores, first, 0.1, against=dict.fromkeys(variants[1:-1], last))
    numbers = ["n_pairs", "difference", "low", "high", "p", "effect_size"]
    for variant in variants[1:-1]:
        left, right = (table[table["variant"] == variant].reset_index(drop=True) for table in (named, by_hand))
        pd.testing.assert_frame_equal(left[numbers], right[numbers])
    assert len(named) == len(compare(scores, first, 0.1))
    pd.testing.assert_series_equal(named["p_holm"], pd.Series(holm(named["p"]), name="p_holm"))


def test_a_ladder_compares_each_rung_with_the_one_below():
    table = compare(study({"a": noisy(0, 0.1), "b": noisy(1, 0.4), "c": noisy(2, 0.7)}), "a", 0.1, against={"c": "b"})
    assert table["difference"].round(1).tolist() == [0.3, 0.3]
    for wrong in ({"d": "a"}, {"c": "d"}):
        with pytest.raises(UserError, match=r"against.*no score belongs to a variant 'd'"):
            compare(study({"a": [0.1], "b": [0.2], "c": [0.3]}), "a", 0.1, against=wrong)
    assert ceilings(study({"a": [0.5] * 9, "b": [1.0] * 9, "c": [1.0] * 9}), "a", 0.1, against={"c": "b"})[
        "variant"
    ].tolist() == ["c"]


# Scores of every kind

SHAPES = {
    "normal": lambda random, size: random.normal(0.5, 0.1, size),
    "bimodal": lambda random, size: random.choice([0.2, 0.9], size) + random.normal(0, 0.02, size),
    "three levels": lambda random, size: random.choice([0.0, 0.5, 1.0], size),
    "ceiling": lambda random, size: random.choice([0.2, 1.0], size, p=[0.05, 0.95]),
    "noisy floor": lambda random, size: abs(random.choice([0.0, 0.3], size) + random.normal(0, 0.02, size)),
}


def allowed(rate, trials):
    """The count that a true rate exceeds once in ten thousand times."""
    return scipy.stats.binom.ppf(0.9999, trials, rate)


def simulated(arms):
    """Many studies as the tasks of one table, which is faster: arms is (variants, studies, seeds)."""
    variant, task, seed = (index.ravel() for index in np.indices(arms.shape))
    return pd.DataFrame({"variant": variant, "task": task, "seed": seed, "score": arms.ravel()})


# In turn


@law
@given(grids)
def test_one_look_at_all_seeds_is_a_plain_comparison(grid):
    scores = drawn(grid)
    looks = [scores["seed"].nunique()]
    assert_frame_equal(compare_in_turn(scores, "v0", 0.1, looks).drop(columns="looked"), compare(scores, "v0", 0.1))


def test_a_decided_comparison_keeps_the_seeds_it_had_and_passes_its_share_on():
    far, near = noisy(1, 0.9, seeds=32), noisy(2, 0.52, 0.03, seeds=32)
    scores = study({"base": noisy(0, 0.5, seeds=32), "far": far, "near": near})
    table = compare_in_turn(scores, "base", 0.01, [12, 32]).set_index("variant")
    assert table["looked"].to_dict() == {"far": 12, "near": 32}
    assert table["n_pairs"].to_dict() == {"far": 12, "near": 32}
    first = compare(scores[scores["seed"] < 12], "base", 0.01).set_index("variant")
    assert table.loc["far", "p_holm"] == pytest.approx(2 * first.loc["far", "p_holm"])
    whole = compare(scores, "base", 0.01).set_index("variant")
    assert table.loc["near", "p_holm"] == pytest.approx(2 * whole.loc["near", "p"])  # alone: the other one is rejected


def test_what_later_seeds_show_takes_no_verdict_back():
    turned = np.concatenate([noisy(1, 0.9, seeds=12), noisy(2, 0.1, seeds=20)])
    scores = study({"base": noisy(0, 0.5, seeds=32), "turned": turned})
    assert only(compare_in_turn(scores, "base", 0.1, [12, 32])).verdict == "better"


def test_equivalence_at_a_look_has_its_share_of_the_error_rate():
    scores = study({"base": noisy(0, 0.5, 0.02), "same": noisy(1, 0.5, 0.02)})
    margins = np.linspace(0.001, 0.1, 400)
    plain, shared = (
        next(m for m in margins if only(find(m)).verdict == "equivalent")
        for find in (
            lambda m: compare(scores, "base", m, alpha=0.025),
            lambda m: compare_in_turn(scores, "base", m, [8, 16]),
        )
    )
    assert plain == shared


def test_a_look_that_is_not_complete_decides_nothing():
    scores = study(
        {"base": noisy(0, 0.5, seeds=16), "far": noisy(1, 0.9, seeds=16), "farther": noisy(2, 1.5, seeds=16)}
    )
    looks = [8, 16]
    for ended, verdicts in (
        ({}, ["better", "better"]),
        ({("far", "copy"): 7}, ["undecided", "better"]),
        ({("base", "copy"): 7}, ["undecided", "undecided"]),
        ({("far", "copy"): 8}, ["better", "better"]),  # the first look was complete, and is enough
    ):
        found = compare_in_turn(scores, "base", 0.1, looks, ended=ended)
        assert found["verdict"].tolist() == verdicts
    against = compare_in_turn(scores, "base", 0.1, looks, against={"farther": "far"}, ended={("far", "copy"): 7})
    assert against["verdict"].tolist() == ["undecided", "undecided"]


def test_undecided_in_turn_asks_for_seeds_beyond_the_last_look():
    scores = study({"base": noisy(0, 0.5), "same": noisy(1, 0.5)})
    row = only(compare_in_turn(scores, "base", 0.001, [4, 8]))
    assert row.verdict == "undecided"
    assert row.seeds_needed > 8
    assert row.seeds_needed >= fewest_seeds(2)


@pytest.mark.parametrize("looks", [[], [0, 3], [8, 8], [8, 4]])
def test_looks_that_cannot_be(looks):
    with pytest.raises(UserError, match="looks: must be increasing"):
        compare_in_turn(study({"base": [0.1], "other": [0.2]}), "base", 0.1, looks)


@pytest.mark.parametrize("shape", SHAPES)
def test_looking_again_and_again_gives_no_more_stars(shape):
    random, studies = np.random.default_rng(7), 300
    stars = 0
    for _ in range(studies):
        arms = SHAPES[shape](random, (3, 16))
        variant, seed = (index.ravel() for index in np.indices(arms.shape))
        scores = pd.DataFrame({"variant": variant, "seed": seed, "score": arms.ravel()})
        stars += compare_in_turn(scores, "0", 0.05, [8, 12, 16])["verdict"].isin(["better", "worse"]).any()
    assert stars <= allowed(0.05, studies)


# Contrasts


@law
@given(grids)
def test_the_contrast_of_two_variants_is_their_comparison(grid):
    scores = drawn(grid)
    others = [name for name in dict.fromkeys(scores["variant"]) if name != "v0"]
    found = contrasts(scores, {name: {name: 1.0, "v0": -1.0} for name in others}, 0.1)
    assert_frame_equal(found, compare(scores, "v0", 0.1))


def test_an_interaction_is_a_difference_of_differences():
    arms = {
        name: noisy(k, mean, 0.01) for k, (name, mean) in enumerate({"n": 0.2, "a": 0.3, "b": 0.4, "ab": 0.8}.items())
    }
    weights = {"a × b": {"ab": 1, "a": -1, "b": -1, "n": 1}, "a": {"ab": 0.5, "a": 0.5, "b": -0.5, "n": -0.5}}
    table = contrasts(study(arms), weights, 0.05).set_index("variant")
    by_seed = arms["ab"] - arms["a"] - arms["b"] + arms["n"]
    test = scipy.stats.ttest_1samp(by_seed, 0)
    row = table.loc["a × b"]
    assert row["difference"] == pytest.approx(by_seed.mean())
    assert row["p"] == pytest.approx(max(test.pvalue, sign_flip_p(by_seed)))
    assert (row["low"], row["high"]) == pytest.approx(tuple(test.confidence_interval(0.95)))
    assert table["verdict"].tolist() == ["better", "better"]
    assert table.loc["a", "difference"] == pytest.approx((0.8 + 0.3 - 0.4 - 0.2) / 2, abs=0.02)


def test_a_contrast_of_a_study_with_looks_has_one_look_s_share():
    arms = {"a": noisy(0, 0.3, 0.02), "b": noisy(1, 0.35, 0.02)}
    weights = {"b": {"b": 1, "a": -1}}
    alone, shared = (only(contrasts(study(arms), weights, 0.05, looks=looks)) for looks in (1, 3))
    assert shared["p_holm"] == pytest.approx(min(1, 3 * alone["p_holm"]))
    assert_frame_equal(
        contrasts(study(arms), weights, 0.1, looks=2),
        compare_in_turn(study(arms), "a", 0.1, [8, 16]).drop(columns="looked"),
    )


def test_additive_changes_have_no_interaction():
    arms = {"n": noisy(0, 0.2, 0.005), "a": noisy(1, 0.4, 0.005), "b": noisy(2, 0.3, 0.005), "ab": noisy(3, 0.5, 0.005)}
    weights = {"a × b": {"ab": 1, "a": -1, "b": -1, "n": 1}}
    assert only(contrasts(study(arms), weights, 0.05)).verdict == "equivalent"
    assert only(contrasts(study(arms), weights, 0.005)).verdict == "undecided"


def test_a_seed_without_one_cell_is_no_seed_of_the_contrast():
    arms = {"n": [0.1, 0.2, 0.3], "a": [0.2, math.nan, 0.4], "b": [0.1, 0.2, 0.3], "ab": [0.4, 0.5, math.nan]}
    weights = {"a × b": {"ab": 1, "a": -1, "b": -1, "n": 1}}
    assert only(contrasts(study(arms), weights, 0.05)).n_pairs == 1


@pytest.mark.parametrize("weights", [{"a": 1.0}, {}, {"a": 0.0, "b": 0.0}, {"c": 1, "a": -1}])
def test_weights_that_are_no_contrast(weights):
    with pytest.raises(UserError, match=r"contrasts\.x"):
        contrasts(study({"a": [0.1], "b": [0.2]}), {"x": weights}, 0.1)


# Bad input


def test_what_a_user_can_get_wrong_is_said_in_a_sentence():
    scores = study({"sinusoidal": [0.1, 0.2], "rope": [0.2, 0.3]})
    wrong = [
        (scores, "sinusodial", {}, "did you mean 'sinusoidal'"),
        (scores, "xyz", {}, "there are sinusoidal, rope"),
        (scores.drop(columns="seed"), "rope", {}, "'seed' is missing"),
        (
            pd.concat([scores, scores.iloc[[1]]]),
            "rope",
            {},
            "'sinusoidal', task 'copy', seed 1 appears more than",
        ),
        (scores.assign(seed=[0, None, 0, 1]), "rope", {}, "row 1 has no seed"),
        (scores.assign(score="high"), "rope", {}, "'score' must hold numbers"),
        (scores, "rope", {"margin": -0.1}, "margin"),
        (scores, "rope", {"alpha": 0.5}, "alpha"),
    ]
    for table, baseline, options, sentence in wrong:
        with pytest.raises(UserError, match=sentence):
            compare(table, baseline, **{"margin": 0.05} | options)


@pytest.mark.parametrize("scale", [1e-300, 1e-150, 1e99, 1e300])
def test_extreme_scores_neither_warn_nor_crash(scale):
    scores = study({"base": noisy(0, 1.0) * scale, "new": noisy(1, 2.0) * scale})
    assert len(compare(scores, "base", 0.05)) == 1


def test_nullable_and_categorical_columns_are_read():
    scores = study({"base": noisy(0, 0.5), "new": noisy(1, 0.7)})
    nullable = scores.astype({"score": "Float64", "seed": "Int64", "variant": "category"})
    assert_frame_equal(compare(nullable, "base", 0.05), compare(scores, "base", 0.05))
    nullable.loc[3, "score"] = pd.NA
    assert only(compare(nullable, "base", 0.05)).n_pairs == 7


# Error rates, simulated


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("seeds", [3, 5, 8])
@pytest.mark.parametrize("rows", [1, 5])
def test_stars_on_identical_arms_stay_below_five_percent(shape, seeds, rows):
    studies = (500 if seeds == 8 else 100) // rows  # below six seeds no star is possible at all
    random = np.random.default_rng(seeds + rows)
    table = compare(simulated(SHAPES[shape](random, (rows + 1, studies, seeds))), "0", 0.05)
    stars = sum((holm(group.p) <= 0.05).any() for _, group in table.groupby("task"))
    assert stars <= (0 if seeds < 6 else allowed(0.05, studies))


@pytest.mark.parametrize("seeds", [3, 5, 8, 10])
@pytest.mark.parametrize("spread", [0.0, 0.01])
def test_rare_failures_at_a_ceiling_are_not_called_equivalent(seeds, spread):
    random = np.random.default_rng(seeds)
    arms = 1 - np.abs(random.normal(0, spread, (2, 300, seeds)))
    arms[1] *= random.random((300, seeds)) >= 0.05  # one seed in twenty fails: worse by the margin
    assert (compare(simulated(arms), "0", 0.05).verdict == "equivalent").sum() <= allowed(0.05, 300)


@pytest.mark.parametrize("seeds", [3, 5, 8])
@pytest.mark.parametrize(("mode", "margin"), [(0.05, 0.05), (0.4, 0.2)])
def test_arms_that_differ_by_the_margin_are_rarely_called_equivalent(seeds, mode, margin):
    random = np.random.default_rng(seeds)
    arms = random.normal(0.5, 0.02, (2, 300, seeds))
    arms[1] += mode * (random.random((300, seeds)) < margin / mode)  # in every seed, or in every other
    assert (compare(simulated(arms), "0", margin).verdict == "equivalent").sum() <= allowed(0.05, 300)


def test_planted_effects_are_found():
    random = np.random.default_rng(0)
    arms = random.normal(0.5, 0.05, (2, 200, 8))
    arms[1] += 0.15  # two standard deviations of the differences
    p = compare(simulated(arms), "0", 0.05).p
    assert np.mean(p <= 0.05) > 0.95
    arms[1] -= 0.15
    assert np.mean(compare(simulated(arms), "0", 0.1).verdict == "equivalent") > 0.8


def test_comparing_a_study_takes_a_blink():
    random = np.random.default_rng(0)
    scores = study({f"v{i}": random.random(8) for i in range(5)}, ("copy", "reverse"))
    fastest = math.inf
    for _ in range(5):
        start = time.process_time()
        compare(scores, "v0", 0.05)
        fastest = min(fastest, time.process_time() - start)
    assert fastest < 0.03
