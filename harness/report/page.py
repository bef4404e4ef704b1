"""What the page says, section by section."""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pandas as pd

from harness.report.answer import lengths_phrase, pending, score_phrase, sentences
from harness.report.blocks import Block, Cell, Image, Items, Page, Section, Table, Text
from harness.report.chapters.chapter import Chapters
from harness.report.tables import (
    LABELS,
    LEDGER,
    Findings,
    at_unequal,
    deviations,
    records,
    reference_of,
    runs_table,
    unequal_costs,
    variants_of,
    versus,
)
from harness.results import IN_DISTRIBUTION, LEARNING_TIME, number_of_looks
from harness.schema import flatten, is_within, quoted
from harness.stats import MOST_SEEDS, fewest_seeds
from harness.wording import (
    ABSENT,
    MATCHED,
    MEANINGS,
    STATUSES,
    counted,
    decimal,
    difference,
    is_known,
    listed,
    metric_name,
    plain,
    probability,
    quantity,
    ranges,
    seconds,
    seen_phrase,
    whole,
    with_interval,
)

SMOKE = "smoke"  # the name of the budget that tests use
SYMBOLS = {"better": "▲", "worse": "▼", "equivalent": "=", "undecided": "?"}
UNLIKE = "≠"
COSTS: dict[str, Callable[[float], str]] = {
    "parameters": whole,
    "active_parameters": whole,
    "flops": quantity,
    "inference_flops": quantity,
    "tokens": quantity,
    "steps": whole,
    "wall_seconds": seconds,
    "peak_memory_bytes": lambda value: f"{value / 2**20:.0f} MiB",
    "cache_bytes": lambda value: quantity(value, "B"),
    "tuning_trials": lambda value: counted(int(value), "trial"),
}


def compose(
    found: Findings, chapters: Chapters, images: dict[str, Image], untested: pd.DataFrame, now: datetime | None = None
) -> Page:
    """The report of a study with its chapters, the pictures that could be drawn, by name, and what is `untested`."""
    document = found.document
    sections = [
        Section("What was compared", _compared(found)),
        *_chapters(found, chapters, images, leads=True),
        Section("Accuracy by length", _accuracy(found, images)),
        Section("Verdicts", _verdicts(found, images)),
        *_chapters(found, chapters, images, leads=False),
        Section("Training", _training(found, images)),
        Section("Inside the models", [image for name, image in images.items() if _is_inside(name)]),
        Section("Runs that did not finish", _failures(found)),
        Section("What it cost", _ledger(found)),
        Section("Method", _method(found)),
        Section("Provenance", _provenance(found, now or datetime.now(UTC))),
        Section("All runs", [_runs(found)]),
    ]
    return Page(
        title=document["study"],
        question=document["question"],
        answer=sentences(found.data, found.compared),
        seen=seen_phrase(untested["finding"]),
        state=_state(found),
        glance=_glance(found),
        sections=[section for section in sections if section.blocks],
    )


def _chapters(found: Findings, chapters: Chapters, images: dict[str, Image], *, leads: bool) -> list[Section]:
    return [
        Section(chapter.title, [*_pictures_of(chapter.name, images), *chapter.blocks(found, table)])
        for chapter, table in chapters
        if chapter.leads == leads
    ]


def _pictures_of(chapter: str, images: dict[str, Image]) -> list[Image]:
    return [image for name, image in images.items() if name == chapter or name.startswith(f"{chapter}_")]


def _is_inside(name: str) -> bool:
    return name.startswith(("attention", "position_codes"))


def _state(found: Findings) -> str:
    left, total = pending(found.data), len(found.data.runs)
    if found.data.is_pilot:
        return "Pilot: its seeds choose settings and conclude nothing, so that every comparison stays undecided."
    if found.document["budget"] == SMOKE:
        return "Smoke: a budget for trying that everything works. Its models have hardly been trained."
    if left:
        return f"Preliminary: {total - left} of {total} runs have ended. Verdicts may change until the last one has."
    return ""


def _glance(found: Findings) -> Table | None:
    """Variant × task, the verdicts only."""
    document = found.document
    table = found.verdicts[found.verdicts["variant"] != document["baseline"]]
    if table.empty:
        return None
    cells = {(row["variant"], row["task"]): row for row in records(table)}
    rows = [
        [Cell(versus(document, name)), *(_glance_cell(cells[name, t]) for t in document["tasks"])]
        for name in variants_of(document)[1:]
    ]
    others = ", or against what is named in brackets" if document.get("against") else ""
    caption = (
        f"Each variant against the baseline “{document['baseline']}”{others}, with the difference in "
        f"{score_phrase(document)}."
    )
    caption += f" {UNLIKE}: at unequal cost (see Verdicts)." * bool(table["unequal"].map(is_known).any())
    return Table(["variant", *document["tasks"]], rows, caption)


def _glance_cell(row: dict[Any, Any]) -> Cell:
    cell = _verdict_cell(row)
    amount = difference(row["difference"], row["bound"]) if is_known(row["difference"]) else ""
    return Cell(" ".join(filter(None, (cell.text, amount, UNLIKE * is_known(row["unequal"])))), cell.tone)


def _verdict_cell(row: dict[Any, Any], costs: dict[str, float] | None = None) -> Cell:
    """A verdict, and the unequal costs that it stands at."""
    verdict = str(row["verdict"])
    qualified = f", {at_unequal(costs)}" if costs else ""
    return Cell(f"{SYMBOLS.get(verdict, '?')} {verdict}{qualified}", verdict)


def _tuning(document: dict[str, Any]) -> list[Block]:
    """That each variant has settings of its own, and how they were found."""
    tuned = document.get("tuned")
    if not tuned:
        return []
    said = (
        f"Tuned: each variant has its own {listed(list(tuned['fields']))}, the best of "
        f"{counted(tuned['asked'], 'setting')} (as many for every variant), found on "
        f"{counted(tuned['pilot_seeds'], 'pilot seed')} and samples that stand in no comparison here."
    )
    edges = [f"{path} of {quoted(name)} ({end})" for name, ends in tuned["edges"].items() for path, end in ends.items()]
    if edges:
        said += f" On the edge of the space, so that better ones may lie beyond it: {listed(edges)}."
    return [Text(said)]


def _matching(document: dict[str, Any]) -> list[Block]:
    """That variants were made to cost the same, and by what."""
    match = document.get("match")
    if not match:
        return []
    return [
        Text(
            f"Matched in {MATCHED[match['cost']]} by {match['field']}: each variant has the value that comes nearest "
            f"to {quoted(document['baseline'])}, counted before training. What else they cost may differ."
        )
    ]


def _compared(found: Findings) -> list[Block]:
    document = found.document
    seeds = document["seeds"]
    trained = [
        f"{task}: trained at {lengths_phrase(document['train_lengths'][task])}"
        + (f", scored at lengths {ranges(tests)}" if (tests := document["test_lengths"].get(task)) else "")
        for task in document["tasks"]
    ]
    blocks: list[Block] = [
        Text(
            f"{counted(len(variants_of(document)), 'variant')} of one model, which differ in "
            f"{listed(document['axes'])} and in nothing else, each trained with "
            f"{'up to ' * bool(document.get('looks'))}{counted(len(seeds), 'seed')} ({ranges(seeds)}) on "
            f"{counted(len(document['tasks']), 'task')}: "
            f"{counted(len(document['runs']), 'run')}, budget “{document['budget']}”."
        ),
        *_matching(document),
        *_tuning(document),
        Items([*trained, _task_note(document)]),
        _differences_table(document),
    ]
    if document.get("why"):
        blocks.append(Text(f"Why this size: {document['why']}"))
    if document.get("claims"):
        blocks.append(Text(f"Bears on the claims {listed(document['claims'])}; the ablation's file says how."))
    return blocks


def _task_note(document: dict[str, Any]) -> str:
    meaning = MEANINGS.get(document["score"], metric_name(document["score"]))
    direction = "higher" if document.get("higher_is_better", True) else "lower"
    if document["score"] == LEARNING_TIME:
        return f"primary score: learning time, {meaning}; {direction} is better"
    return f"primary score: {score_phrase(document)} ({meaning}), every length weighing the same; {direction} is better"


def _differences_table(document: dict[str, Any]) -> Table:
    """A row a variant: what it is on the axes that vary."""
    spec = document["spec"]
    first = spec["tasks"].get(document["tasks"][0], {})
    base = flatten({"model": spec["model"], "train": spec["train"], "task": first})
    on_axes = {field: value for field, value in base.items() if is_within(field, document["axes"])}
    rows = []
    for name in variants_of(document):
        is_base = name == document["baseline"]
        fields = on_axes if is_base else document["differences"].get(name, {})
        label = f"{name} (baseline)" if is_base else name
        rows.append(
            [Cell(label), Cell(", ".join(f"{field} = {plain(value)}" for field, value in fields.items()) or ABSENT)]
        )
    caption = "Fields that are not named here are the same for all (see Method)."
    return Table(["variant", "fields of its specification that differ"], rows, caption)


def _accuracy(found: Findings, images: dict[str, Image]) -> list[Block]:
    blocks: list[Block] = [images["accuracy_by_length"]] if "accuracy_by_length" in images else []
    counts = found.lengths.groupby("task")["length"].nunique()
    fewest = 1 if found.document["score"] == LEARNING_TIME else 2  # the means at one length are the verdicts' scores
    return blocks + [_length_table(found, t) for t in found.document["tasks"] if counts.get(t, 0) >= fewest]


def _length_table(found: Findings, task: str) -> Table:
    """Mean score a variant and length."""
    own = found.lengths[found.lengths["task"] == task]
    lengths = sorted(int(n) for n in own["length"].unique())
    cells = {(row["variant"], row["length"]): row for row in records(own)}
    rows = [
        [Cell(name), *(_length_cell(cells.get((name, length))) for length in lengths)]
        for name in variants_of(found.document)
        if any((name, length) in cells for length in lengths)
    ]
    trained = set(own.loc[own["split"] == "train", "length"])
    heads = [f"{length}{'*' if length in trained else ''}" for length in lengths]
    refused = own["mark"].str.startswith("unsupported").any()
    caption = f"Mean {metric_name(found.data.metric)} over seeds. *: a training length."
    caption += " ×: unsupported, counts as 0." * bool(refused)
    return Table(["variant", *heads], rows, caption, folded=f"{task}: the numbers, length by length")


def _length_cell(row: dict[Any, Any] | None) -> Cell:
    if row is None:
        return Cell(ABSENT)
    cross = "×" if str(row["mark"]).startswith("unsupported") else ""
    return Cell(decimal(row["mean"], 2) + cross)


def _verdicts(found: Findings, images: dict[str, Image]) -> list[Block]:
    blocks: list[Block] = []
    for task in found.document["tasks"]:
        rows = records(found.verdicts[found.verdicts["task"] == task])
        blocks.append(_verdict_table(found, task, rows))
        blocks += _verdict_notes(rows)
    blocks += [Text("How to read these tables:"), Items(_how_to_read(found))]
    return blocks + [images[name] for name in ("differences", "scores") if name in images]


def _verdict_table(found: Findings, task: str, rows: list[dict[Any, Any]]) -> Table:
    columns = [
        f"on {task}", "verdict", "score", "baseline", "difference", "95 % interval", "corrected p", "effect size g",
        "pairs", "passed gate", "score of those", "seeds needed",
    ]  # fmt: skip
    costs = unequal_costs(found.ledger, found.document)
    return Table(columns, [_verdict_row(found, row, costs.get((row["variant"], task))) for row in rows])


def _verdict_notes(rows: list[dict[Any, Any]]) -> list[Block]:
    """What qualifies a row: ties and what they leave open."""
    notes: dict[str, list[str]] = {}
    for row in rows:
        if is_known(row["note"]):
            notes.setdefault(str(row["note"]), []).append(quoted(row["variant"]))
    return [Items([f"{listed(names)}: {note}" for note, names in notes.items()])] if notes else []


def _verdict_row(found: Findings, row: dict[Any, Any], costs: dict[str, float] | None) -> list[Cell]:
    is_base = row["variant"] == found.document["baseline"]
    open_ = row["verdict"] == "undecided" and is_known(row["seeds_needed"])
    size, between = with_interval(row["difference"], row["low"], row["high"], 3, bound=row["bound"])
    return [
        Cell(f"{row['variant']} (baseline)" if is_base else versus(found.document, row["variant"])),
        Cell(ABSENT) if is_base else _verdict_cell(row, costs),
        Cell(decimal(row["score"])),
        Cell(decimal(row["baseline_score"])),
        Cell(size),
        Cell(between),
        Cell(probability(row["p_holm"])),
        Cell(decimal(row["effect_size"], 2, signed=True)),
        Cell(str(row["seeds"])),
        Cell(f"{row['gate_passed']} of {row['gate_of']}", "marked" if row["gate_passed"] < row["gate_of"] else ""),
        Cell(decimal(row["gated_score"])),
        Cell(_needed(row, fewest_seeds(len(found.compared) * number_of_looks(found.document))) if open_ else ABSENT),
    ]


def _needed(row: dict[Any, Any], fewest: int) -> str:
    """How many seeds would decide it; where nothing is known of that, the fewest that can, if there are less. Ties are
    not decided by seeds.
    """
    if is_known(row["note"]):
        return "another setting"
    if row["seeds_needed"] < MOST_SEEDS:
        return f"{int(row['seeds_needed'])}"
    return f"≥ {fewest if row['seeds'] < fewest else MOST_SEEDS}"


def _how_to_read(found: Findings) -> list[str]:
    document = found.document
    gate, margin = decimal(document["gate"], 2), f"{document['margin']:g}"
    return [
        "score, baseline: mean primary score over the pairs; a pair is a seed that has a score in both "
        "arms. The baseline's own row is over all its seeds. difference is variant minus baseline, with "
        "its 95 % interval." + " A variant in brackets takes the baseline's place." * bool(document.get("against")),
        "▲ better, ▼ worse: the difference is significant after correction for all comparisons of the "
        "study, however small it is.",
        f"= equivalent: shown to lie within ±{margin}, which this study declared not to matter; never where half of "
        "the pairs tie, as a few seeds then say nothing of rare failures.",
        "? undecided: neither a difference nor its absence is shown. It does not mean “equal”. seeds "
        "needed: how many seeds would probably decide it if mean and spread stay as they are.",
        f"passed gate: runs that learned their training lengths (exact match ≥ {gate}), of all that ended; "
        "score of those: their mean alone."
        + " A variant that misses the gate has not learned the task, so its score says nothing about longer sequences."
        * any(document["test_lengths"].values()),
        *_limits(found),
    ]


def _limits(found: Findings) -> list[str]:
    """What unequal costs, bounds and ties mean, where there are any."""
    timed = found.document["score"] == LEARNING_TIME
    items = []
    if found.verdicts["unequal"].map(is_known).any():
        items.append(
            "at unequal …: these costs are more than 5 % off those of what the variant is compared with, so that the "
            "verdict cannot tell the component from its cost. Wall time, peak memory and KV cache are marked under "
            "What it cost alone."
        )
    if found.verdicts["bound"].isin(("≥", "≤", "≈")).any():
        items.append(
            "≥ at least, ≤ at most: a run that never learned counts as 1, the end of its training, although it would "
            "have taken longer; ≥ where the variant has such runs, ≤ where what it is compared with has, ≈ where both "
            "have. Interval and verdict are those of the values as counted."
        )
    if found.verdicts["note"].notna().any():
        items.append(
            f"a pair ties if its scores are equal, or both within half a margin ({found.document['margin'] / 2:g}) of "
            f"the same end of the scale.{' At its top, 1, neither run learned.' * timed}"
        )
    return items


def _training(found: Findings, images: dict[str, Image]) -> list[Block]:
    blocks: list[Block] = [images["loss"]] if "loss" in images else []
    if "steps_to_threshold" in images:
        blocks.append(images["steps_to_threshold"])
    if not found.speed.empty:
        blocks.append(_speed_table(found))
    elif any(str(column).endswith("steps_to_threshold") for column in found.data.runs.columns):
        blocks.append(Text("No run reached the threshold at which its training lengths count as learned."))
    return blocks


def _speed_table(found: Findings) -> Table:
    ties = {(r["variant"], r["task"]) for r in records(found.verdicts) if is_known(r["failure_bound"])}
    other = "what it is compared with" if found.document.get("against") else "the baseline"
    rows = [
        [
            Cell(row["task"]),
            Cell(row["variant"]),
            Cell(f"{row['reached']} of {row['runs']}", "marked" if row["reached"] < row["runs"] else ""),
            *(Cell(decimal(row[name], 0)) for name in ("median", "fastest", "slowest")),
            *[Cell("yes" if (row["variant"], row["task"]) in ties else "")] * bool(ties),
        ]
        for row in records(found.speed)
    ]
    columns = ["task", "variant", "reached", "median steps", "fastest seed", "slowest seed"]
    timed = " and learning time" * (found.document["score"] == LEARNING_TIME)
    caption = (
        "Training steps to the threshold, over the seeds that reached it. It is read off training batches, the gate"
        f"{timed} off evaluations: a run may reach the one and miss the other."
    )
    return Table([*columns, *[f"scores tie with {other}"] * bool(ties)], rows, caption)


def _failures(found: Findings) -> list[Block]:
    total, failed = len(found.data.runs), found.failures
    blocks: list[Block] = []
    if failed.empty:
        blocks.append(Text(f"None: all {counted(total, 'run')} finished."))
    else:
        rows = [
            [
                Cell(STATUSES.get(r["status"], r["status"])),
                Cell(r["cause"] or ABSENT),
                Cell(str(r["count"])),
                Cell(r["which"]),
            ]
            for r in records(failed)
        ]
        caption = (
            f"Of {counted(total, 'planned run')}. A run whose loss was no longer finite gets the worst score; one that "
            "failed or ran out of memory has no score and leaves its pair out."
        )
        blocks.append(Table(["outcome", "cause", "runs", "which"], rows, caption))
    for row in records(found.unsupported):
        blocks.append(
            Text(
                f"Unsupported lengths: {row['variant']} cannot take {row['task']} at lengths "
                f"{row['lengths']}; these score 0."
            )
        )
    return blocks


def _ledger(found: Findings) -> list[Block]:
    if not found.ledger["runs"].any():
        return [Text("No run has finished yet.")]
    rows = []
    shown = [name for name in LEDGER if (found.ledger[name] > 0).any()]
    bases = {(row["variant"], row["task"]): row for row in records(found.ledger)}
    for row in records(found.ledger):
        changes = deviations(row, bases[reference_of(found.document, row["variant"]), row["task"]])
        rows.append(
            [
                Cell(row["task"]),
                Cell(row["variant"]),
                Cell(str(row["runs"])),
                *(_cost_cell(name, row[name], changes.get(name, "")) for name in shown),
                Cell(row["attention_backend"] or ABSENT),
                Cell(row["attention_reason"] or ABSENT),
                Cell(" ".join(x for x in (row["device"], row["precision"]) if x) or ABSENT),
            ]
        )
    columns = ["task", "variant", "runs", *(LABELS[name] for name in shown), "attention kernel", "why", "device"]
    caption = (
        "Medians over finished runs. ≠ marks what is more than 5 % off what the variant is compared with. "
        "Wall time is that of training and depends on what else the machine did; FLOPs are counted, "
        "attention in full."
    )
    if "inference_flops" in shown or "cache_bytes" in shown:
        where = _longest(found.document)
        caption += f" Inference FLOPs (one forward pass) and KV cache are those of one sequence {where}."
    caption += " Tuning budget: none, no variant has settings of its own from a sweep." * ("tuning_trials" not in shown)
    return [Table(columns, rows, caption)]


def _longest(document: dict[str, Any]) -> str:
    """`at the longest test length, 20`: where `cost.inference_costs` counts, task by task where these differ."""
    ends = {
        task: f"at the longest test length, {max(tests)}"
        if (tests := document["test_lengths"].get(task))
        else f"at the longest training length, {document['train_lengths'][task][-1]}"
        for task in document["tasks"]
    }
    if len(set(ends.values())) == 1:
        return next(iter(ends.values()))
    return "; ".join(f"on {task} {end}" for task, end in ends.items())


def _cost_cell(name: str, value: Any, change: str) -> Cell:
    text = ABSENT
    if is_known(value):
        text = COSTS[name](value)
    return Cell(f"{text} (≠ {change})", "marked") if change else Cell(text)


def _method(found: Findings) -> list[Block]:
    return [Items(_method_items(found)), *_spec_tables(found.document)]


def _method_items(found: Findings) -> list[str]:
    document = found.document
    comparisons = max(1, len(found.compared))
    fewest = fewest_seeds(comparisons * number_of_looks(document))
    gate = decimal(document["gate"], 2)
    return [
        "Pairing. A seed fixes the training data, their order and the initial value of every parameter "
        "that variants share. Each variant is trained with the same seeds as the baseline "
        f"{quoted(document['baseline'])}, and differences are taken seed by seed{_references(document)}.",
        f"Score. {metric_name(document['score'])}: {MEANINGS.get(document['score'], 'as named')}; measured "
        "on fresh sequences that have their own random stream, with the right answer fed back (teacher "
        f"forcing). For exact match that equals greedy decoding{_greedy(found)}. The estimand is the mean "
        "over all seeds, not over the good ones.",
        "Test. p is the larger of two: the paired t test and the exact sign-flip test on the seeds' "
        "differences; differences without any spread never count as significant. Holm's correction covers "
        f"all {counted(comparisons, 'comparison')} of the study (every variant on every task), at a "
        "family-wise error rate of 5 %. With so many comparisons no difference can be significant below "
        f"{fewest} seeds.",
        *_looks(document),
        "Interval. The 95 % t interval of the mean paired difference, for one comparison alone, "
        "uncorrected. Effect size: Hedges' g of the paired differences (mean over standard deviation, "
        "corrected for few seeds).",
        f"Equivalence. Two one-sided tests (TOST) at 5 % within ±{document['margin']:g}. Where at least "
        "half of the pairs tie (both scores within half the margin of the same end of the scale, or equal "
        "anywhere), the spread says nothing about rare failures: equivalent is not given there, and the notes "
        "state the Clopper–Pearson bound on the share of seeds that may still differ. Bounding it by 10 % takes "
        "29 tied seeds and none that is not.",
        f"Gate. A run has learned its task if its exact match over the training lengths is at least {gate}. "
        "Verdicts use all seeds, passed or not.",
        "Failures are results. A run whose loss is no longer finite, or ends far above its start, has "
        "diverged; the former gets the worst score. A length that a variant cannot take scores 0 and is marked "
        "unsupported.",
        "Training data are fresh at every step unless the specification below says otherwise; lengths with "
        "so few sequences that training saw most of them or all are marked in the figures.",
    ]


def _looks(document: dict[str, Any]) -> list[str]:
    """How a study that runs until it is decided keeps its error rate."""
    looks = document.get("looks")
    if not looks:
        return []
    return [
        f"Looks. The study looks at its verdicts after {listed([str(look) for look in looks])} seeds and gives more "
        "only to what is undecided; a verdict once given stays. Each look spends an equal share of the error rates: "
        f"corrected p is multiplied by {len(looks)}, and TOST is at 5 % ÷ {len(looks)}. `make calibrate` measures the "
        "errors that are left."
    ]


def _references(document: dict[str, Any]) -> str:
    pairs = [f"{variant} − {other}" for variant, other in document.get("against", {}).items()]
    return f"; here {listed(pairs)}, the others to the baseline" if pairs else ""


def _greedy(found: Findings) -> str:
    runs = found.data.runs
    values = (
        runs["eval/greedy_agreement"].dropna() if "eval/greedy_agreement" in runs.columns else pd.Series(dtype=float)
    )
    if values.empty:
        return ""
    agree = int((values == 1).sum())
    return f", which a spot check of decoded sequences confirmed in {agree} of {counted(len(values), 'run')}"


def _spec_tables(document: dict[str, Any]) -> list[Block]:
    spec = document["spec"]
    fields = flatten({"model": spec["model"], "train": spec["train"]})
    blocks: list[Block] = [_field_table(fields, "The baseline: every field of its model and training")]
    tasks = {name: flatten(task) for name, task in spec.get("tasks", {}).items()}
    names = list(dict.fromkeys(field for fields in tasks.values() for field in fields))
    rows = [[Cell(name or "kind"), *(Cell(plain(t.get(name))) for t in tasks.values())] for name in names]
    if rows:
        blocks.append(Table(["field", *tasks], rows, folded="The tasks: every field"))
    return blocks


def _field_table(fields: dict[str, Any], folded: str) -> Table:
    return Table(
        ["field", "value"], [[Cell(name), Cell(plain(value))] for name, value in fields.items()], folded=folded
    )


def _provenance(found: Findings, now: datetime) -> list[Block]:
    document, environment = found.document, found.data.environment
    facts = {
        "study": document["study"],
        "command": document.get("command", ""),
        "budget": document["budget"],
        "commit": environment["commit"],
        "report written": f"{now:%Y-%m-%d %H:%M} UTC",
        **{name: value for name, value in environment.items() if name != "commit"},
    }
    rows = [[Cell(name), Cell(plain(value) if is_known(value) else "unknown")] for name, value in facts.items()]
    files = (
        "Beside this page: runs.csv (a row a run, with fingerprint and MLflow run id), scores.csv (every "
        "score, full precision), comparison.csv (a row a comparison), tables/ (this page's tables, "
        "unrounded), figures/ (PNG). Where the study was run also report.html, figures as SVG with text as text, and "
        "tables/as_shown/ (as they stand here: CSV, Markdown, LaTeX)."
    )
    return [Table(["", ""], rows), Text(files)]


def _runs(found: Findings) -> Table:
    score = found.data.primary().set_index(["variant", "task", "seed"])["score"]
    rows = [
        [
            *(Cell(str(row[name])) for name in ("task", "variant", "seed")),
            Cell(STATUSES.get(row["status"], row["status"]), "" if row["status"] == "finished" else "marked"),
            Cell(decimal(score.get((row["variant"], row["task"], row["seed"])))),
            Cell(decimal(row.get(IN_DISTRIBUTION))),
            Cell(plain(row["fingerprint"])),
            Cell(plain(row["mlflow_run_id"])),
        ]
        for row in records(runs_table(found.data))
    ]
    columns = ["task", "variant", "seed", "outcome", "score", "in distribution", "fingerprint", "MLflow run id"]
    return Table(columns, rows, folded=f"{counted(len(rows), 'run')}, with fingerprints and MLflow run ids")
