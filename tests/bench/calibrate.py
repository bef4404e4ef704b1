"""`make calibrate`: how often the verdicts of `harness.stats` are wrong where the truth is known, and how often they
see what is there. Every study that is simulated goes through `harness.stats.compare` (or `compare_in_turn`, for
`--until decided`) as a real one does; nothing here knows how these decide.

Writes a table for each kind of error, one of the power, their figure and a page to results/reference/calibration.
`--train` first trains the runs that are split into two arms of the same variant (a quarter of an hour; it resumes).
"""

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure

from harness.conduct import run_study
from harness.locate import find_ablation
from harness.machine import commit, environment
from harness.record import write_atomically
from harness.results import load_study
from harness.stats import clopper_pearson, compare, compare_in_turn
from harness.study import Ablation

ROOT = Path(__file__).parents[2]
MARGIN, ALPHA, SPREAD = 0.05, 0.05, 0.1  # spread: of the differences whose power is shown
SEEDS, COMPARISONS = (3, 5, 8, 10, 20), (1, 5, 10)
TRAINED_SEEDS = 16
LOOKS = ((8, 16, 32), (5, 10, 20))  # of `--until decided`: seeds after which a comparison may stop
Draws = npt.NDArray[np.float64]
Shape = Callable[[np.random.Generator, tuple[int, ...]], Draws]


def normal(random: np.random.Generator, size: tuple[int, ...]) -> Draws:
    """Scores that scatter around the middle."""
    return random.normal(0.5, 0.1, size)


def noisy_bimodal(random: np.random.Generator, size: tuple[int, ...]) -> Draws:
    """Learned or not, each with a little noise."""
    return random.choice([0.2, 0.9], size) + random.normal(0, 0.02, size)


def zero_or_one(random: np.random.Generator, size: tuple[int, ...]) -> Draws:
    """Learned or not, exactly."""
    return random.choice([0.0, 1.0], size)


def rare_failure(random: np.random.Generator, size: tuple[int, ...]) -> Draws:
    """One seed in twenty fails; the rest scatter near the top."""
    return np.where(random.random(size) < 0.05, 0.2, 1 - abs(random.normal(0, 0.01, size)))


def at_the_floor(random: np.random.Generator, size: tuple[int, ...]) -> Draws:
    """Most seeds score nothing, some a little."""
    return np.clip(random.normal(-0.05, 0.1, size), 0, 1)


def at_the_ceiling(random: np.random.Generator, size: tuple[int, ...]) -> Draws:
    """Most seeds are perfect, some a little below."""
    return np.clip(random.normal(1.05, 0.1, size), 0, 1)


def three_levels(random: np.random.Generator, size: tuple[int, ...]) -> Draws:
    """Three scores and no other."""
    return random.choice([0.0, 0.5, 1.0], size)


def finely_discrete(random: np.random.Generator, size: tuple[int, ...]) -> Draws:
    """Shares of 64 test sequences, all equally hard."""
    return random.binomial(64, 0.7, size) / 64


def paired(random: np.random.Generator, size: tuple[int, ...]) -> Draws:
    """The seed decides most of the score: arms of a pair resemble each other."""
    return random.normal(0.5, 0.2, size[-1]) + random.normal(0, 0.02, size)


SHAPES: Mapping[str, Shape] = {
    "normal": normal, "noisy bimodal": noisy_bimodal, "exactly 0 or 1": zero_or_one, "rare failure": rare_failure,
    "at the floor": at_the_floor, "at the ceiling": at_the_ceiling, "three levels": three_levels,
    "finely discrete": finely_discrete, "paired": paired,
}  # fmt: skip


def table(arms: Draws) -> pd.DataFrame:
    """`arms[variant, seed]` as a study's long table."""
    variant, seed = (index.ravel() for index in np.indices(arms.shape))
    return pd.DataFrame({"variant": variant.astype(str), "seed": seed, "score": arms.ravel()})


@dataclass(frozen=True)
class Case:
    """Studies of one kind.

    Attributes:
        kind: what is counted: *identical* arms found different, *edge* (arms that differ by the margin) or *ceiling*
            (arms that tie at the top) found equivalent, *power* (arms that differ by `effect`) found different or
            equivalent.
        shape: of the scores.
        seeds: of a study, or the looks of one that runs until it is decided.
        comparisons: variants beside the baseline.
        effect: how much every variant is better than the baseline.
        spread: the standard deviation of a pair's difference, where the kind varies it.
    """

    kind: str
    shape: str
    seeds: tuple[int, ...]
    comparisons: int = 1
    effect: float = 0.0
    spread: float = 0.0

    @property
    def key(self) -> int:
        return int.from_bytes(hashlib.sha256(repr(self).encode()).digest()[:8])


def drawn(case: Case, random: np.random.Generator) -> Draws:
    """One study's scores `(variants, seeds)`."""
    size = (case.comparisons + 1, case.seeds[-1])
    if case.kind == "identical":
        return SHAPES[case.shape](random, size)
    if case.kind == "ceiling":
        return np.where(random.random(size) < 0.05, 0.2, 1.0)
    arms = random.normal(0.5, case.spread / np.sqrt(2), size)
    arms[1:] += case.effect
    return arms


def verdicts(case: Case, studies: int) -> dict[str, int]:
    """In how many of the studies each verdict was given at least once, and the seeds that were run in all."""
    random = np.random.default_rng(case.key)
    counts = {"better or worse": 0, "equivalent": 0, "undecided": 0, "better": 0, "worse": 0, "runs": 0}
    for _ in range(studies):
        scores = table(drawn(case, random))
        if len(case.seeds) > 1:
            found = compare_in_turn(scores, "0", MARGIN, case.seeds)
            counts["runs"] += int(found["looked"].sum())
        else:
            found = compare(scores, "0", MARGIN)
            counts["runs"] += int(found["n_pairs"].sum())
        given = set(found["verdict"])
        counts["better or worse"] += bool(given & {"better", "worse"})
        for verdict in ("better", "worse", "equivalent", "undecided"):
            counts[verdict] += verdict in given
    return counts


def cases() -> Iterator[Case]:
    """Every kind of study that is simulated."""
    plans = [(seeds,) for seeds in SEEDS] + list(LOOKS)
    for shape in SHAPES:
        for seeds in plans:
            for comparisons in COMPARISONS:
                yield Case("identical", shape, seeds, comparisons)
    for seeds in plans:
        for spread in (0.01, 0.02, 0.05, 0.1):
            yield Case("edge", "normal", seeds, effect=MARGIN, spread=spread)
        yield Case("ceiling", "rare failure, exact", seeds)
    for seeds in [(5,), (6,), (8,), (10,), (20,), LOOKS[0]]:
        for comparisons in (1, 5):
            for effect in (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0):
                yield Case("power", "normal", seeds, comparisons, effect=effect * SPREAD, spread=SPREAD)


def measured(case: Case, studies: int) -> dict[str, object]:
    """A row of the table: the case, and in how many of its studies it went how; a quarter of them where each looks
    several times, which takes that much longer.
    """
    studies = studies // 4 if len(case.seeds) > 1 else studies
    counts = verdicts(case, studies)
    return {
        "kind": case.kind, "shape": case.shape, "seeds": "/".join(map(str, case.seeds)),
        "comparisons": case.comparisons, "effect": case.effect, "spread": case.spread, "studies": studies, **counts,
    }  # fmt: skip


def passes(row: Mapping[str, object]) -> bool:
    """Whether a row keeps its promise, but for what the number of its studies leaves open (one time in a thousand)."""
    wrong, studies = {
        "identical": ("better or worse", ALPHA), "edge": ("equivalent", ALPHA), "ceiling": ("equivalent", 0.0)
    }[str(row["kind"])], int(str(row["studies"]))  # fmt: skip
    low, _ = clopper_pearson(int(str(row[wrong[0]])), studies, 0.002)
    return low <= wrong[1]


def percent(share: float) -> str:
    return f"{share:.1%}".replace("%", " %")


def errors_table(rows: pd.DataFrame) -> str:
    """The worst of 1, 5 and 10 comparisons, a line a shape, a column a number of seeds."""
    identical = rows[rows["kind"] == "identical"]
    shares = identical.assign(share=identical["better or worse"] / identical["studies"])
    worst = shares.groupby(["shape", "seeds"], sort=False)["share"].max().unstack("seeds")
    return markdown(worst[identical["seeds"].unique()].loc[list(SHAPES)], "scores")


def edges_table(rows: pd.DataFrame) -> str:
    """*Equivalent* where it is wrong: at the margin's edge, and where ties hide failures."""
    edge = rows[rows["kind"].isin(["edge", "ceiling"])]
    names = [
        f"arms differ by the margin, spread {row.spread:g}" if row.kind == "edge" else "ties at 1, one seed in 20 fails"
        for row in edge.itertuples()
    ]
    shares = edge.assign(name=names, share=edge["equivalent"] / edge["studies"])
    table = shares.pivot(index="name", columns="seeds", values="share")
    return markdown(table[edge["seeds"].unique()].loc[list(dict.fromkeys(names))], "")


def power_table(rows: pd.DataFrame) -> str:
    """How often at least one of one comparison is found, by effect."""
    power = rows[(rows["kind"] == "power") & (rows["comparisons"] == 1)]
    shares = power.assign(share=power["better"] / power["studies"], size=power["effect"] / SPREAD)
    table = shares.pivot(index="size", columns="seeds", values="share")
    table.index = [f"{size:g}" for size in table.index]
    return markdown(table[power["seeds"].unique()], "difference ÷ its spread")


def markdown(shares: pd.DataFrame, corner: str) -> str:
    """Shares as a table of per cents."""
    lines = [f"| {corner} | {' | '.join(map(str, shares.columns))} |", "|---" * (len(shares.columns) + 1) + "|"]
    for name, row in shares.iterrows():
        lines.append(f"| {name} | {' | '.join(percent(share) for share in row)} |")
    return "\n".join(lines)


def draw(rows: pd.DataFrame, folder: Path) -> None:
    """The power curves, one a number of seeds."""
    power = rows[rows["kind"] == "power"].assign(
        found=lambda frame: frame["better"] / frame["studies"], size=lambda frame: frame["effect"] / SPREAD
    )
    figure = Figure(figsize=(7.6, 3.2), layout="constrained")
    both = figure.subplots(1, 2, sharey=True)
    for axes, (comparisons, group) in zip(both, power.groupby("comparisons"), strict=True):
        sns.lineplot(group, x="size", y="found", hue="seeds", marker="o", palette="viridis", ax=axes)
        axes.set(
            title=f"{comparisons} comparison{'s' * (comparisons > 1)}", ylim=(-0.02, 1.02),
            xlabel="true difference ÷ its standard deviation", ylabel="studies that find one",
        )  # fmt: skip
        axes.get_legend().remove()
    figure.legend(*both[0].get_legend_handles_labels(), title="seeds", loc="outside center right", frameon=False)
    for suffix in ("png", "svg"):
        figure.savefig(folder / f"power.{suffix}", dpi=150)


PAGE = """# How often the verdicts are wrong

Simulated studies whose truth is known, {studies} of each kind, through `harness.stats.compare` at α = .05 and a
margin of .05; numbers of seeds with strokes (8/16/32) are `--until decided`, which looks after each (a quarter
as many studies). Reproduce it with
`make calibrate` ({seconds:.0f} s on {machine}, commit {commit}). {passed}

## *Better* or *worse* where nothing differs

The share of studies with at least one such verdict, the worst of 1, 5 and 10 comparisons a study. To be at most 5 %;
a simulated share scatters by ±{scatter}, by twice as much where studies look several times.

{errors}

## *Equivalent* where it is wrong

One comparison a study. To be at most 5 % where the arms differ by exactly the margin, and 0 where ties hide failures.

{edges}

## What is found

One comparison, normal scores: the share of studies that call a real difference *better*.

{power}

![power](power.png)

## What this does not say

- Below 6, 8 and 9 seeds nothing can be significant among 1, 5 and 10 comparisons: the verdict is *undecided*.
- A failure rarer than about one in the number of seeds is not met: {rare} of the studies with 8 seeds call an arm
  *better* that scores .05 more in 95 % of the seeds and .95 less in the others, so that both have the same mean.
- The seeds are the only thing that is drawn: another task, size or learning rate is another question.
{trained}"""


def rare_and_large(studies: int, seeds: int = 8) -> float:
    """How often an arm whose mean is the other's, thanks to a rare disaster, is called better."""
    random, found = np.random.default_rng(5), 0
    for _ in range(studies):
        arms = 0.9 + random.normal(0, 0.005, (2, seeds))
        arms[1] += np.where(random.random(seeds) < 0.05, -0.95, 0.05)
        found += "better" in set(compare(table(arms), "0", MARGIN)["verdict"])
    return found / studies


def train(path: Path, results: Path) -> None:
    """Train the quick position study's baseline and two encodings with twice eight seeds, and keep their scores."""
    whole = find_ablation("position").ablation
    few = {name: whole.variants[name] for name in (whole.baseline, "ALiBi", "NoPE")}
    fields = {name: getattr(whole, name) for name in type(whole).model_fields}
    outcome = run_study(Ablation(**{**fields, "variants": few}), name="split", seeds=TRAINED_SEEDS, results=results)
    write_atomically(path, str(load_study(outcome.folder).primary().to_csv(index=False, lineterminator="\n")))


def split(scores: pd.DataFrame, studies: int) -> tuple[int, int]:
    """How many of so many studies of a trained variant with itself are starred, its runs dealt to two arms."""
    random, starred, done = np.random.default_rng(11), 0, 0
    groups = [group["score"].to_numpy() for _, group in scores.groupby(["variant", "task"])]
    for values in groups:
        for _ in range(studies // len(groups)):
            arms = random.permutation(values).reshape(2, -1)
            starred += bool(set(compare(table(arms), "0", MARGIN)["verdict"]) & {"better", "worse"})
            done += 1
    return starred, done


def trained(path: Path, studies: int) -> str:
    """What splits of really trained runs say, or nothing where there are none."""
    if not path.exists():
        return ""
    scores = pd.read_csv(path, keep_default_na=False, na_values=[""])
    starred, done = split(scores, studies)
    return (
        f"\n## Trained, not simulated\n\nThe runs of {scores.groupby(['variant', 'task']).ngroups} cells of the quick "
        f"position study, {TRAINED_SEEDS} seeds each (trained.csv, by `make calibrate ARGS=--train`), dealt to two "
        f"arms of {TRAINED_SEEDS // 2} at random and compared: {percent(starred / done)} of {done} such studies find a "
        f"difference of a variant to itself (the splits share their runs, so this is no independent sample).\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=1000, help="of each kind")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--publish", type=Path, default=ROOT / "results" / "reference" / "calibration")
    parser.add_argument("--train", action="store_true", help="train the runs that are split into two arms")
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "calibration", help="where --train works")
    given = parser.parse_args()
    given.publish.mkdir(parents=True, exist_ok=True)
    if given.train:
        train(given.publish / "trained.csv", given.results)
    begun = time.monotonic()
    everything = list(cases())
    with ProcessPoolExecutor(given.jobs, mp_context=get_context("spawn")) as pool:
        rows = pd.DataFrame(pool.map(measured, everything, [given.studies] * len(everything), chunksize=1))
    judged = rows[rows["kind"] != "power"]
    failed = judged[[not passes(row) for row in judged.to_dict("records")]]
    rows.to_csv(given.publish / "calibration.csv", index=False, lineterminator="\n")
    draw(rows, given.publish)
    page = PAGE.format(
        studies=given.studies,
        seconds=time.monotonic() - begun,
        machine=environment()["cpu"],
        commit=commit(),
        passed=f"**{len(failed)} kinds break it.**"
        if len(failed)
        else f"None of {len(judged)} kinds is shown to break it.",
        scatter=percent(1.96 * np.sqrt(ALPHA * (1 - ALPHA) / given.studies)),
        errors=errors_table(rows),
        edges=edges_table(rows),
        power=power_table(rows),
        rare=percent(rare_and_large(given.studies)),
        trained=trained(given.publish / "trained.csv", given.studies),
    )
    write_atomically(given.publish / "README.md", page)
    print(page)
    if not failed.empty:
        print(failed.to_string(), file=sys.stderr)
    return int(not failed.empty)


if __name__ == "__main__":
    sys.exit(main())
