"""What each command does: options in, an `Answer` out.

Commands import what they need when they are called, so that `harness --help` is quick. An answer is shown on stdout,
the summary of a study on stderr after its progress.
"""

import gc
import json
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.locks import holder
from harness.record import has_record, read_plan
from harness.schema import UserError, nearest, quoted
from harness.wording import STATUSES, decimal, listed

if TYPE_CHECKING:
    from argparse import Namespace

    import pandas as pd

    from harness.claims import Judged
    from harness.conduct import Outcome
    from harness.forecast import Forecast
    from harness.locate import Found
    from harness.results import StudyData
    from harness.study import Plan
    from harness.sweep import SweepOutcome

DONE, INCOMPLETE, INTERRUPTED = 0, 1, 130
NO_STUDY = "there is no study in {}"


@dataclass(frozen=True)
class Answer:
    """What a command has to say: as data for `--json`, and a way to show it to people."""

    document: Mapping[str, Any]
    show: Callable[[], None]
    exit_code: int = DONE


@contextmanager
def importing() -> Iterator[None]:
    """Garbage collection waits while torch and pandas are imported: they make a million objects, and all stay."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def ablate(options: "Namespace") -> Answer:
    """Run what is left of a study, or show what would run."""
    with importing():
        from harness.conduct import run_study
        from harness.locate import find_ablation
        from harness.progress import watch
        from harness.study import folder_name
        from harness.tracking import without_password

    found = find_ablation(options.study)
    options.budget = options.budget or found.ablation.default_budget
    found, options.provenance = _tuned(options, found) if options.tuned else (found, None)
    options.cap = _cap(options, found)
    if options.plan:
        return plan(options, found)
    name = folder_name(found.name, pilot=options.pilot, tuned=options.tuned)
    with watch(options.results / name, sys.stderr) as display:
        outcome = run_study(
            found.ablation,
            name=found.name,
            budget=options.budget,
            seeds=options.seeds,
            pilot=options.pilot,
            tuned=options.provenance,
            cap=options.cap,
            jobs=options.jobs,
            device=options.device,
            tracking_uri=options.tracking_uri,
            results=options.results,
            display=display,
            diagnose=not options.no_diagnostics,
            command=without_password(options.typed),
        )
    return _ended(options, name, outcome)


def _cap(options: "Namespace", found: "Found") -> int | None:
    """The most seeds of a study that runs until it is decided; None of one that does not."""
    if options.until is None:
        if options.cap is not None:
            raise UserError(f"--cap {options.cap} is the most seeds of --until decided; name that too")
        return None
    if options.cap is not None:
        return int(options.cap)
    from harness.stats import fewest_seeds
    from harness.study import PILOT_SEED

    seeds = options.seeds or found.ablation.budget(options.budget).seeds
    comparisons = (len(found.ablation.variants) - 1) * len(found.ablation.tasks)
    return min(PILOT_SEED, max(4 * seeds, fewest_seeds(4 * comparisons)))  # so many looks at most, mostly three


def _tuned(options: "Namespace", found: "Found") -> "tuple[Found, dict[str, Any]]":
    """The ablation with the settings that its sweep found, and what there is to say of that sweep."""
    from harness.tuned import provenance, read_tuned, tuned_ablation

    if options.pilot:
        raise UserError("--tuned and --pilot exclude each other: the sweep was on pilot seeds already")
    answer = read_tuned(options.results, found.name, found.ablation, options.budget)
    return replace(found, ablation=tuned_ablation(found.ablation, options.budget, answer)), provenance(answer)


def sweep(options: "Namespace") -> Answer:
    """Tune named fields for each variant of an ablation."""
    with importing():
        from harness.locate import find_ablation
        from harness.progress import console
        from harness.sweep import run_sweep
        from harness.tracking import without_password

    found = find_ablation(options.study)
    out = console(sys.stderr)
    outcome = run_sweep(
        found.ablation,
        name=found.name,
        budget=options.budget,
        trials=options.trials,
        seeds=options.seeds,
        sampler=options.sampler,
        pruning=not options.no_pruning,
        costs=options.cost,
        storage=options.storage,
        jobs=options.jobs,
        device=options.device,
        tracking_uri=options.tracking_uri,
        results=options.results,
        say=lambda line: out.print(line, soft_wrap=True),
        command=without_password(options.typed),
    )
    document = {
        "study": found.name,
        "folder": str(outcome.folder),
        "interrupted": outcome.interrupted,
        "counts": {str(state): int(n) for state, n in outcome.table["status"].value_counts().items()},
        "tuned": outcome.answer,
        "exit_code": outcome.exit_code,
    }
    return Answer(document, lambda: _show_sweep(options, found.name, outcome), outcome.exit_code)


def _show_sweep(options: "Namespace", name: str, outcome: "SweepOutcome") -> None:
    """The end of a sweep, on stderr like its progress."""
    from harness.progress import console, table
    from harness.report.sweep import warnings_of
    from harness.tracking import without_password

    out, answer = console(sys.stderr), outcome.answer
    if outcome.interrupted:
        out.print(f"{name}: interrupted; all is saved", soft_wrap=True)
        out.print(f"go on with: {without_password(options.typed)}", soft_wrap=True)
        return
    fields = list(answer["fields"])
    rows = []
    for variant, each in answer["variants"].items():
        values = [_value(each["changes"][path]) if each["changes"] else "" for path in fields]
        rows.append([variant, str(each["tried"]), *values, decimal(each["score"])])
    out.print(table(["variant…", ">tried", *(f">{path.rpartition('.')[2]}" for path in fields), ">score"], rows))
    for line in warnings_of(answer):
        out.print(line, soft_wrap=True)
    out.print(f"summary: {outcome.folder / 'summary.md'}", soft_wrap=True)
    out.print(f"compare the tuned variants: harness ablate {options.study} --tuned --budget {answer['budget']}",
              soft_wrap=True)  # fmt: skip


def _value(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _ended(options: "Namespace", name: str, outcome: "Outcome") -> Answer:
    import pandas as pd

    path = outcome.folder / "tables" / "verdicts.csv"
    names = dict.fromkeys(("variant", "task", "reference"), str)  # one may be called "None" or "NA"
    verdicts = None if outcome.interrupted else pd.read_csv(path, dtype=names, keep_default_na=False, na_values=[""])
    document = {
        "study": name,
        "folder": str(outcome.folder),
        "report": None if outcome.interrupted else str(outcome.folder / "report.html"),
        "interrupted": outcome.interrupted,
        "unchanged": outcome.unchanged,
        "counts": outcome.counts,
        "verdicts": None if verdicts is None else rows_of(verdicts),
        "exit_code": outcome.exit_code,
    }
    return Answer(document, lambda: _summarise(options, name, outcome, verdicts), outcome.exit_code)


def _summarise(options: "Namespace", name: str, outcome: "Outcome", verdicts: "pd.DataFrame | None") -> None:
    """The end of a study, on stderr like its progress."""
    from harness.progress import console, verdict_table
    from harness.tracking import without_password

    out = console(sys.stderr)
    done, total = outcome.counts.get("finished", 0), sum(outcome.counts.values())
    if verdicts is None:
        out.print(f"{name}: interrupted with {done} of {total} runs done; all is saved", soft_wrap=True)
        out.print(f"go on with: {without_password(options.typed)}", soft_wrap=True)
        return
    said = f"{done} of {total} runs finished"
    if outcome.unchanged:
        said += " before, and the report is up to date"
    if bad := _counted({state: n for state, n in outcome.counts.items() if state != "finished"}):
        said += f"; {bad} (the report says why)"
    out.print(f"{name}: {said}", soft_wrap=True)
    out.print(verdict_table(verdicts))
    out.print(f"report: {outcome.folder / 'report.html'}", soft_wrap=True)
    where = "" if options.results == Path("results") else f" --results {shlex.quote(str(options.results))}"
    pages = without_password(options.tracking_uri) if options.tracking_uri else f"harness dashboard{where}"
    out.print(f"runs and curves: {pages}", soft_wrap=True)


def plan(options: "Namespace", found: "Found") -> Answer:
    """What would run, and what it would cost; nothing is written."""
    from harness.conduct import resolve_device, resolve_jobs, undecidable
    from harness.forecast import forecast
    from harness.study import make_plan

    device = resolve_device(options.device)
    planned = make_plan(
        found.name,
        found.ablation,
        budget=options.budget,
        seeds=options.seeds,
        device=device,
        pilot=options.pilot,
        tuned=options.provenance,
        cap=options.cap,
    )
    workers = resolve_jobs(options.jobs, device)
    expected = forecast(planned, options.results / planned.name)
    notices = [*expected.notices, *undecidable(planned)]
    if planned.looks:
        notices.append(
            f"this is the first look; what is undecided then gets more seeds, to look again after "
            f"{listed([str(look) for look in planned.looks[1:]])}"
        )
    document = {
        "study": planned.name,
        "budget": planned.budget,
        "device": device,
        "workers": workers,
        "seeds": list(planned.seeds),
        "runs": len(planned.cells),
        "left": expected.left,
        "flops_left": expected.flops_left,
        "seconds_left": expected.seconds(workers),
        "notices": notices,
        "cells": [asdict(cell) | {"seconds_left": cell.seconds_left} for cell in expected.cells],
    }
    return Answer(document, lambda: _show_plan(planned, workers, expected, notices))


def _show_plan(planned: "Plan", workers: int, expected: "Forecast", notices: list[str]) -> None:
    from harness.progress import clock, console, table

    out = console(sys.stdout)
    means = f"budget {planned.budget}, {planned.device}, {workers} worker{'s' * (workers != 1)}"
    out.print(f"{planned.name}: {expected.left} of {len(planned.cells)} runs to do ({means}); costs are of one run")
    for notice in notices:
        out.print(notice, soft_wrap=True)
    rows = [
        [
            cell.task,
            cell.variant,
            f"{cell.done}" + (f" ({cell.failed} failed)" if cell.failed else ""),
            f"{cell.left}" + (f" ({cell.partial} begun)" if cell.partial else ""),
            f"{cell.parameters:,}",
            f"{cell.flops:.2e}",
            f"{cell.tokens:,}",
            "unknown" if cell.seconds is None else ("≈ " if cell.basis == "FLOPs" else "") + clock(cell.seconds),
        ]
        for cell in expected.cells
    ]
    out.print(table(["task…", "variant…", ">done", ">left", ">parameters", ">FLOPs", ">tokens", ">time"], rows))
    seconds = expected.seconds(workers)
    time = "unknown: nothing comparable has been run here" if seconds is None else f"about {clock(seconds)}"
    rest = f"all that is left: {expected.flops_left:.2e} FLOPs, time {time}"
    out.print(rest if expected.left else "nothing is left to do", soft_wrap=True)


def report(options: "Namespace") -> Answer:
    """Rewrite a study's report, or publish it."""
    data = _load(options)
    if options.publish and data.is_pilot:
        raise UserError(f"{data.folder.name} is a pilot, which concludes nothing; publish the study itself")
    from harness.report import write_report

    folder = options.results / "reference" / data.folder.name if options.publish else data.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_report(data, folder, publish=options.publish)
    except PermissionError as error:
        raise UserError(f"{error.filename}: cannot be written ({error.strerror}); change its rights") from error
    files = [str(folder / name) for name in (("report.md",) if options.publish else ("report.html", "report.md"))]
    document = {"study": data.folder.name, "published": options.publish, "files": files}
    return Answer(document, lambda: _say(*files))


def status(options: "Namespace") -> Answer:
    """What is done of a study, from its records alone; without a name, one line a study."""
    if options.study is None:
        return _overview(options.results)
    data = _load(options)
    compared = data.compare()
    failed = data.runs[data.runs["status"].isin(("diverged", "out_of_memory", "failed"))]
    document = {
        "study": data.document["study"],
        "budget": data.document["budget"],
        "folder": str(data.folder),
        "runs": len(data.runs),
        "counts": {str(state): int(n) for state, n in data.runs["status"].value_counts().items()},
        "running": holder(data.folder / "lock"),
        "failures": rows_of(failed[["variant", "task", "seed", "status", "cause"]]),
        "comparison": rows_of(compared),
    }
    return Answer(document, lambda: _show_status(data, compared, document))


def _show_status(data: "StudyData", compared: "pd.DataFrame", document: dict[str, Any]) -> None:
    from harness.progress import console, table

    name = document["study"]
    _say(f"{name} (budget {document['budget']}): {document['runs']} runs: {_counted(document['counts'])}")
    if document["running"] is not None:
        _say(_runner(document["running"]))
    console(sys.stdout).print(table(["task…", "variant…", ">ended", ">score", "verdict"], _status_rows(data, compared)))
    for row in document["failures"]:
        _say(f"{row['task']} · {row['variant']} · seed {row['seed']}: {row['status']}: {row['cause']}")
    page = data.folder / "report.html"
    _say(f"report: {page}" if page.exists() else f"no report yet; `harness report {name}` writes one")


def _runner(signature: dict[str, Any]) -> str:
    return "it is being run" + (" by process {pid} on {host} since {since}".format(**signature) if signature else "")


def _overview(results: Path) -> Answer:
    """How far every study in a results folder has come."""
    found = {folder.name: _progress(folder) for folder in studies(results)}
    lines = [_in_a_line(name, progress) for name, progress in found.items()] or [NO_STUDY.format(results)]
    is_corrupt = any("error" in progress for progress in found.values())
    return Answer({"studies": found}, lambda: _say(*lines), INCOMPLETE if is_corrupt else DONE)


def _progress(folder: Path) -> dict[str, Any]:
    try:
        plan = read_plan(folder)
    except UserError as error:
        return {"error": str(error)}
    ended = sum(has_record(folder, run["fingerprint"]) for run in plan["runs"])
    running = holder(folder / "lock")
    return {"budget": plan["budget"], "runs": len(plan["runs"]), "ended": ended, "running": running}


def _in_a_line(name: str, progress: dict[str, Any]) -> str:
    if "error" in progress:
        return f"{name}: {progress['error']}"
    said = f"{name} (budget {progress['budget']}): {progress['ended']} of {progress['runs']} runs have ended"
    return said if progress["running"] is None else f"{said}; {_runner(progress['running'])}"


def _status_rows(data: "StudyData", compared: "pd.DataFrame") -> Iterable[list[str]]:
    scores, baseline = data.primary(), data.document["baseline"]
    verdicts = {(row["task"], row["variant"]): row["verdict"] for row in compared.to_dict("records")}
    for task in data.document["tasks"]:
        for variant in data.document["variants"]:
            runs = data.runs[(data.runs["task"] == task) & (data.runs["variant"] == variant)]
            own = scores.loc[(scores["task"] == task) & (scores["variant"] == variant), "score"]
            ended = (~runs["status"].isin(("missing", "partial"))).sum()
            verdict = "baseline" if variant == baseline else verdicts.get((task, variant), "") if ended else ""
            yield [task, variant, f"{ended}/{len(runs)}", decimal(own.mean()) if own.notna().any() else "", verdict]


def _load(options: "Namespace") -> "StudyData":
    with importing():
        from harness.locate import study_name
        from harness.results import load_study

    name = study_name(options.study)
    if not (options.results / name / "study.json").exists():
        known = [folder.name for folder in studies(options.results)]
        remedy = nearest(name, known) if known else f"run `harness ablate {name}` first"
        raise UserError(f"there is no study {name!r} in {options.results}; {remedy}")
    return load_study(options.results / name)


def studies(results: Path) -> list[Path]:
    """The folders of all studies in a results folder."""
    return sorted(path.parent for path in results.glob("*/study.json"))


def _load_files(options: "Namespace") -> None:
    """Make the levels and tasks of the user's own files known."""
    from harness.sources import load_source

    for file in options.load:
        load_source(file)


def catalogue(options: "Namespace") -> Answer:
    """What there is: components, tasks, ablations, presets or one of them; or the answers that are published, or the
    probes of `diagnose`.
    """
    _load_files(options)
    if options.what == "answers":
        return _answers(options.results / "reference")
    if options.what == "probes":
        return _probes()
    with importing():
        from harness.catalogue import document

    found = document(options.what)
    return Answer(found, lambda: _show_catalogue(found))


def _answers(reference: Path) -> Answer:
    with importing():
        from harness.report.index import answers, as_markdown

    found = answers(reference)
    return Answer({"answers": [asdict(each) for each in found]}, lambda: _say(as_markdown(found)))


def _probes() -> Answer:
    """The catalogue of what `diagnose` looks for."""
    with importing():
        from harness.diagnostics import DETECTORS, PROBES

    def show() -> None:
        for probe in PROBES:
            _say("", *probe.lines())
        _say("", "Detectors, of how a run trained:")
        for detector in DETECTORS:
            _say("", *detector.lines())

    kinds = {"probes": [p.document() for p in PROBES], "detectors": [d.document() for d in DETECTORS]}
    return Answer(kinds, show)


def _show_catalogue(found: dict[str, Any]) -> None:
    from harness.progress import console, table

    out = console(sys.stdout)
    if "components" in found:
        out.print("* what a spec has when nothing is said")
    for path, levels in found.get("components", {}).items():
        modules = dict.fromkeys(level["module"] for level in levels)
        out.print(f"\n{path} (from {', '.join(modules)})", style="bold")
        kernels = [level["kernel"] for level in levels]
        columns, rows = ["level", "what…", "paper…", "fields…"], [_level_row(level) for level in levels]
        if any(kernels):
            columns, rows = [*columns, "kernel…"], [[*row, said] for row, said in zip(rows, kernels, strict=True)]
        out.print(table(columns, rows))
    if "sizes" in found:
        out.print("\nnumbers", style="bold")
        out.print(table(["field", "default…"], ([size["name"], _default(size)] for size in found["sizes"])))
    if "tasks" in found:
        out.print("\ntasks", style="bold")
        out.print(table(["task", "what…", "paper…", "fields…"], map(_level_row, found["tasks"])))
    if "presets" in found:
        out.print("\npresets", style="bold")
        out.print(table(["preset", "what…"], ([preset["name"], preset["what"]] for preset in found["presets"])))
    for ablation in found.get("ablations", ()):
        out.print(f"\nharness ablate {ablation['name']}", style="bold")
        out.print(ablation["question"] or f"cannot be loaded: {ablation['error']}")
        for key in ("claims", "axes", "variants", "tasks", "budgets"):
            if ablation[key]:
                out.print(f"  {key}: {', '.join(quoted(name) for name in ablation[key])}")


def _level_row(level: dict[str, Any]) -> list[str]:
    fields = "; ".join(f"{field['name']} = {_default(field)}" for field in level["fields"])
    name = level["name"] + " *" * level["default"]
    return [name, level["what"], "; ".join(level["papers"]), fields]


def _default(field: dict[str, Any]) -> str:
    return str(field["default"]) + (f" ({field['bounds']})" if field["bounds"] else "")


def cost(options: "Namespace") -> Answer:
    """What a model costs, without training it."""
    with importing():
        from harness.catalogue import cost_document, model_named
        from harness.cost import counting

    _load_files(options)
    name, spec, vocab_size, train = model_named(options.model, options.vocab)
    limit = spec.position.limit()
    lengths = options.length or [n for n in (512, 2048, 8192) if limit is None or n <= limit] or [limit]
    with counting(name):
        found = cost_document(name, spec, vocab_size, sorted(set(lengths)), options.number, train)
    return Answer(found, lambda: _show_cost(found))


def _show_cost(found: dict[str, Any]) -> None:
    from harness.progress import console, table

    out = console(sys.stdout)
    said = f"{found['model']}: {found['parameters']:,} parameters"
    if found["active_parameters"] != found["parameters"]:
        said += f", {found['active_parameters']:,} of them active for a token"
    out.print(f"{said} (vocabulary {found['vocab_size']:,})", soft_wrap=True)
    parts = [[part, f"{n:,}", f"{n / found['parameters']:.1%}"] for part, n in found["parameters_by_part"].items()]
    out.print(table(["part…", ">parameters", ">share"], parts))
    out.print(
        "FLOPs of one sequence (products: those that attention has in the forward pass); score matrices and caches of "
        f"one, in {found['number']}; flash stores no scores"
    )
    if found["longest"] is not None:
        out.print(f"its positions take {found['longest']:,} tokens at most")
    rows = [
        [
            f"{row['length']:,}",
            f"{row['forward_flops']:.3e}",
            f"{row['attention_product_flops']:.3e}",
            f"{row['training_flops']:.3e}",
            "—" if row["decoding_flops"] is None else f"{row['decoding_flops']:.3e}",
            _bytes(row["score_bytes_a_head"]),
            _bytes(row["score_bytes"]),
            _bytes(row["cache_bytes_a_layer"]),
            _bytes(row["cache_bytes"]),
        ]
        for row in found["lengths"]
    ]
    columns = [
        ">length",
        ">forward",
        ">products",
        ">training",
        ">next token",
        ">scores/head",
        ">scores, all",
        ">KV/layer",
        ">KV, all",
    ]
    out.print(table(columns, rows))


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:,.4g} TiB"


def diagnose(options: "Namespace") -> Answer:
    """What probes find in the untrained model of a spec, or in that of a run, and detectors in how it trained."""
    with importing():
        from harness.diagnosis import of_run, of_spec

    if options.run_name is not None and options.spec is not None:
        raise UserError(f"{options.run_name} and --spec {options.spec} exclude each other: diagnose a run, or a spec")
    if options.run_name is None and options.spec is None:
        raise UserError("name a run, or a preset or file with --spec; `harness diagnose --help` says more")
    _load_files(options)
    found = of_spec(options.spec) if options.spec is not None else of_run(options.run_name, options.results)
    findings = found.findings(dear=options.overfit)
    alarms = [finding for finding in findings if finding.alarms]
    document = {
        "model": found.name,
        "outcome": found.outcome,
        "diagnosis": alarms[0].probe.name if alarms else None,
        "findings": [finding.document() for finding in findings],
    }

    def show() -> None:
        _say(f"{found.name}{f' ({found.outcome})' if found.outcome else ''}")
        for finding in alarms:
            _say(*finding.lines())
        for finding in findings:
            if finding.remarks:
                _say(f"(unusual, and often healthy) {finding.lines()[0]}", finding.lines()[1])
        looked = sum(finding.measured for finding in findings)
        seconds = sum(finding.seconds for finding in findings)
        said = {0: "none of them alarms", 1: "one of them alarms"}.get(len(alarms), f"{len(alarms)} of them alarm")
        rest = f"{len(findings) - looked} do not apply ({seconds:.1f} s)"
        _say(f"{looked} probes and detectors looked at it, {said}; {rest}")

    return Answer(document, show, INCOMPLETE if alarms else DONE)


def compare(options: "Namespace") -> Answer:
    """What differs between runs, or between studies, and what came of each."""
    with importing():
        from harness.comparison import Study, find, of_runs, of_studies, read_run
        from harness.results import load_study

    kind, folders = find(options.names, options.results)
    if kind == "run":
        found = of_runs([read_run(folder) for folder in folders])
    else:
        from harness.report.tables import findings, score_summaries

        studies = [findings(load_study(folder)) for folder in folders]
        found = of_studies([Study(each.data, score_summaries(each.data), each.verdicts) for each in studies])
    return Answer(found, lambda: _show_comparison(found))


def _show_comparison(found: dict[str, Any]) -> None:
    from harness.comparison import tables
    from harness.progress import console, table

    out = console(sys.stdout)
    gap, below = (2 if out.width >= 100 else 1), False
    for each in tables(found, out.width):
        if below:
            out.print()
        if each.title:
            out.print(each.title, style="bold" if each.rows else "", soft_wrap=True)
        if each.rows:
            out.print(table(each.columns, each.rows, gap=gap))
        below = bool(each.rows)


def claims(options: "Namespace") -> Answer:
    """What the records say of the articles' claims; with `--run` after what they lack was run."""
    with importing():
        from harness.claims import CLAIMS, Records, judge, publish, row, summary

    wanted = [_claim_id(given, list(CLAIMS)) for given in options.ids] or list(CLAIMS)
    if options.publish and options.ids:
        raise UserError("--publish writes all claims; leave out " + ", ".join(options.ids))
    code = _run_claims(options, wanted) if options.lacking else DONE
    if code == INTERRUPTED:
        raise KeyboardInterrupt
    files = [str(path) for path in publish(options.results)] if options.publish else []
    judged, family = judge(Records(options.results, published_only=options.publish))
    shown = [each for each in judged if each.claim.id in wanted]
    document = {
        "summary": summary(judged, family),
        "claims": [row(each, family) for each in shown],
        "files": files,
    }
    return Answer(document, lambda: _show_claims(shown, document, whole=len(options.ids) == 1), code)


def _claim_id(given: str, known: list[str]) -> str:
    if given.upper() not in known:
        raise UserError(f"there is no claim {given!r}; {nearest(given, known)}")
    return given.upper()


def _run_claims(options: "Namespace", wanted: list[str]) -> int:
    """Run what the records of some claims lack: studies with their quick budget, then the tests behind laws; the exit
    code, 130 where a study was interrupted.
    """
    from harness.claims import CLAIMS, Records, judge, laws, laws_of, missing_studies
    from harness.conduct import run_study
    from harness.locate import find_ablation
    from harness.progress import watch
    from harness.tracking import without_password

    judged, _ = judge(Records(options.results), [CLAIMS[name] for name in wanted])
    code = DONE
    for name in missing_studies(judged):
        with watch(options.results / name, sys.stderr) as display:
            outcome = run_study(
                find_ablation(name).ablation,
                name=name,
                budget="quick",
                jobs=options.jobs,
                device=options.device,
                tracking_uri=options.tracking_uri,
                results=options.results,
                display=display,
                command=without_password(options.typed),
            )
        if outcome.interrupted:
            return outcome.exit_code
        code = max(code, outcome.exit_code)
    outcomes = laws.run(laws_of(judged), options.results)
    return max(code, INCOMPLETE if any(found["outcome"] == "failed" for found in outcomes.values()) else DONE)


def _show_claims(shown: "list[Judged]", document: dict[str, Any], *, whole: bool) -> None:
    from harness.claims import effect, lines
    from harness.progress import console, table

    if whole:
        _say(*lines(shown[0]))
        return
    rows = [[each.claim.id, each.verdict, effect(each.headline), each.claim.sentence] for each in shown]
    console(sys.stdout).print(table(["claim", "verdict", ">effect", "what it says…"], rows))
    verdicts, family = document["summary"]["verdicts"], document["summary"]["family"]
    _say(f"of {document['summary']['claims']} claims: {_counted({v: len(ids) for v, ids in verdicts.items()})}")
    _say(
        f"{family['tests']} comparisons are corrected as one family (false discovery rate {family['alpha']}), which "
        f"takes {family['lost_to_the_correction']} of {family['differences_before']} differences away"
    )
    _say(*document["files"])


def doctor(options: "Namespace") -> Answer:
    """What works here."""
    with importing():
        from harness.doctor import FAIL, examine

    checks = examine(options.results, options.tracking_uri)
    ill = any(check.state == FAIL for check in checks)

    def show() -> None:
        from harness.progress import console, table

        rows = ([check.state, check.name, check.found, check.remedy] for check in checks)
        console(sys.stdout).print(table(["", "what", "found…", "remedy…"], rows))

    return Answer({"ok": not ill, "checks": [asdict(check) for check in checks]}, show, INCOMPLETE if ill else DONE)


def dashboard(options: "Namespace") -> Answer:
    """Serve MLflow's pages until Ctrl-C."""
    from harness.dashboard import dashboard as serve

    if (options.results / "mlflow.db").is_file():
        _say("MLflow is starting, which takes some seconds …")
    # The links are the answer, wanted while the command runs: until it ends, the command line sends stdout to stderr.
    with serve(options.results, options.port) as served, redirect_stdout(sys.__stdout__):
        _say(f"MLflow at {served.address}, for this machine only; Ctrl-C ends it")
        for link in served.links:
            _say(f"  {link.text}: {link.address}")
        sys.stdout.flush()
        try:
            code = served.wait()
        except KeyboardInterrupt:
            code = DONE
    return Answer({}, lambda: None, code)


def sync(options: "Namespace") -> Answer:
    """Deliver every study in the results folder to the store it was run with, or to the one that is named."""
    from harness.tracking import Mirror, StoreError, TreeMirror, default_uri
    from harness.tracking.uri import check

    if options.tracking_uri:
        check(options.tracking_uri)
    delivered, failed = {}, {}
    for folder in studies(options.results):
        try:
            uri = options.tracking_uri or _recorded_uri(folder) or default_uri(options.results)
            delivered[folder.name] = Mirror(uri, folder).deliver()
        except (StoreError, UserError) as error:  # the others are delivered all the same
            failed[folder.name] = " ".join(str(error).split())
    for path in sorted(options.results.glob("*/sweep/sweep.json")):
        name = f"{path.parent.parent.name}-sweep"
        try:
            uri = options.tracking_uri or _stored_uri(json.loads(path.read_text())) or default_uri(options.results)
            delivered[name] = TreeMirror(uri, path.parent, name).deliver()
        except (StoreError, ValueError) as error:  # a UserError is a ValueError
            failed[name] = " ".join(str(error).split())

    def show() -> None:
        for name, count in delivered.items():
            _say(f"{name}: " + (f"{count} run{'s' * (count != 1)} delivered" if count else "no run was missing"))
        for name, cause in failed.items():
            _say(f"{name}: not delivered: {cause}; run this again when that is mended")
        if not delivered and not failed:
            _say(NO_STUDY.format(options.results))

    return Answer({"delivered": delivered, "failed": failed}, show, INCOMPLETE if failed else DONE)


def _recorded_uri(folder: Path) -> str | None:
    """The tracking store that a study's last `ablate` named, if it named any."""
    return _stored_uri(read_plan(folder))


def _stored_uri(document: Mapping[str, Any]) -> str | None:
    uri: str | None = document.get("tracking_uri")
    if uri and "…@" in uri:
        raise UserError(f"its store is {uri}, whose password is not kept; name it with --tracking-uri")
    return uri


def _say(*lines: str) -> None:
    """Lines on stdout."""
    from harness.progress import console

    for line in lines:
        console(sys.stdout).print(line, soft_wrap=True)


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{n} {STATUSES.get(state, state)}" for state, n in counts.items())


def rows_of(frame: "pd.DataFrame") -> list[dict[str, Any]]:
    """A DataFrame as a list of rows."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]
