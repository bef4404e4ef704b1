"""What each command does: options in, an `Answer` out. They import what they need themselves, so that `--help` is quick."""

import argparse
import gc
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.schema import UserError, nearest

if TYPE_CHECKING:
    import pandas as pd

    from harness.conduct import Outcome
    from harness.results import StudyData

@contextmanager
def importing() -> Iterator[None]:
    """Garbage collection waits while torch and pandas are imported: they make a million objects, and all stay."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def ablate(options: argparse.Namespace) -> Answer:
    """Run what is left of a study, or show what would run."""
    with importing():
        from harness.conduct import run_study
        from harness.locate import find_ablation
        from harness.progress import watch
        from harness.tracking.uri import check

    if options.tracking_uri:
        check(options.tracking_uri)  # before anything is written
    found = find_ablation(options.study)
    if options.plan:
        return _plan(options, found.name, found.ablation)
    with watch(options.results / found.name, sys.stderr) as display:
        outcome = run_study(
            found.ablation,
            name=found.name,
            budget=options.budget,
            seeds=options.seeds,
            jobs=options.jobs,
            device=options.device,
            tracking_uri=options.tracking_uri,
            results=options.results,
            display=display,
            command=_without_password(options.typed),
        )
    return _outcome(options, found.name, outcome)


def _without_password(command: str) -> str:
    """The command as it may be recorded and published."""
    return re.sub(r"(://[^/@\s]*:)[^/@\s]*@", r"\1…@", command)


def _outcome(options: argparse.Namespace, name: str, outcome: "Outcome") -> Answer:
    import pandas as pd

    verdicts = outcome.folder / "tables" / "verdicts.csv"
    table = None if outcome.interrupted or not verdicts.exists() else pd.read_csv(verdicts, keep_default_na=True)
    document = {
        "study": name,
        "folder": str(outcome.folder),
        "report": None if table is None else str(outcome.folder / "report.html"),
        "interrupted": outcome.interrupted,
        "unchanged": outcome.unchanged,
        "counts": outcome.counts,
        "verdicts": None if table is None else rows_of(table),
        "exit_code": outcome.exit_code,
    }
    return Answer(document, lambda: _summarise(options, name, outcome, table), outcome.exit_code)


def _summarise(options: argparse.Namespace, name: str, outcome: "Outcome", verdicts: "pd.DataFrame | None") -> None:
    """The end of a study, on stderr like its progress."""
    from harness.progress import console, verdict_table

    out = console(sys.stderr)
    done, total = outcome.counts.get("finished", 0), sum(outcome.counts.values())
    failed = {status: n for status, n in outcome.counts.items() if status != "finished"}
    if outcome.interrupted:
        out.print(
            f"{name}: interrupted with {done} of {total} runs done; all is saved, the same command goes on",
            soft_wrap=True,
        )
        return
    said = (
        f"all {total} runs were done before, and the report is up to date"
        if outcome.unchanged
        else f"{done} of {total} runs finished"
    )
    bad = ", ".join(f"{n} {status.replace('_', ' ')}" for status, n in failed.items())
    out.print(f"{name}: {said}" + (f"; {bad} (the report says why)" if bad else ""), soft_wrap=True)
    if verdicts is not None:
        out.print(verdict_table(verdicts))
    out.print(f"report: {outcome.folder / 'report.html'}", soft_wrap=True)
    where = "" if options.results == Path("results") else f" --results {shlex.quote(str(options.results))}"
    out.print(f"runs and curves: {options.tracking_uri or f'harness dashboard{where}'}", soft_wrap=True)


def _plan(options: argparse.Namespace, name: str, ablation: Any) -> Answer:
    """What would run; writes nothing."""
    from harness.conduct import resolve_device, resolve_jobs
    from harness.forecast import forecast
    from harness.study import make_plan

    device = resolve_device(options.device)
    plan = make_plan(name, ablation, budget=options.budget, seeds=options.seeds, device=device)
    workers = resolve_jobs(options.jobs, device)
    expected = forecast(plan, options.results / name)
    seconds = expected.seconds(workers)
    document = {
        "study": name,
        "budget": plan.budget,
        "device": device,
        "workers": workers,
        "seeds": list(plan.seeds),
        "runs": len(plan.cells),
        "left": expected.left,
        "flops_left": expected.flops_left,
        "seconds_left": seconds,
        "notices": list(expected.notices),
        "cells": [asdict(cell) | {"seconds_left": cell.seconds_left} for cell in expected.cells],
    }

    def show() -> None:
        from harness.progress import clock, console, table

        columns = ["task…", "variant…", ">done", ">left", ">parameters", ">FLOPs", ">tokens", ">time"]
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
        out = console(sys.stdout)
        means = f"budget {plan.budget}, {device}, {workers} worker{'s' * (workers != 1)}"
        out.print(f"{name}: {expected.left} of {len(plan.cells)} runs to do ({means}); costs are those of one run")
        for notice in expected.notices:
            out.print(notice, soft_wrap=True)
        out.print(table(columns, rows))
        time = "unknown (nothing comparable has been run here)" if seconds is None else f"about {clock(seconds)}"
        out.print(
            f"all that is left: {expected.flops_left:.2e} FLOPs, time {time}"
            if expected.left
            else "nothing is left to do"
        )

    return Answer(document, show)


def report(options: argparse.Namespace) -> Answer:
    """Rewrite a study's report, or publish it."""
    from harness.report import write_report

    data = _load(options)
    folder = data.folder
    if options.publish:
        folder = options.results / "reference" / data.folder.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_report(data, folder, publish=options.publish)
    except PermissionError as error:
        raise UserError(f"{error.filename}: cannot be written ({error.strerror}); change its rights") from error
    files = [str(folder / name) for name in ("report.html", "report.md")]
    return Answer(
        {"study": data.folder.name, "published": options.publish, "files": files}, lambda: print(*files, sep="\n")
    )


def status(options: argparse.Namespace) -> Answer:
    """What is done of a study, from its records alone."""
    data = _load(options)
    document = data.document
    compared = _compared(data)
    counts = {str(state): int(n) for state, n in data.runs["status"].value_counts().items()}
    runner = _conducted_by(data.folder)
    failed = data.runs[data.runs["status"].isin(("diverged", "out_of_memory", "failed"))]
    answer = {
        "study": document["study"],
        "budget": document["budget"],
        "folder": str(data.folder),
        "runs": len(data.runs),
        "counts": counts,
        "running": runner,
        "failures": rows_of(failed[["variant", "task", "seed", "status", "cause"]]),
        "comparison": rows_of(compared),
    }

    def show() -> None:
        from harness.progress import console, table

        out = console(sys.stdout)
        said = ", ".join(f"{n} {state.replace('_', ' ')}" for state, n in counts.items())
        out.print(f"{document['study']} (budget {document['budget']}): {len(data.runs)} runs: {said}", soft_wrap=True)
        if runner:
            pid, host, since = (runner.get(key, "?") for key in ("pid", "host", "since"))
            out.print(f"it is being run by process {pid} on {host} since {since}", soft_wrap=True)
        out.print(table(["task…", "variant…", ">ended", ">score", "verdict"], _status_rows(data, compared)))
        for row in answer["failures"]:
            out.print(
                f"{row['task']} · {row['variant']} · seed {row['seed']}: {row['status']}: {row['cause']}",
                soft_wrap=True,
            )
        page = data.folder / "report.html"
        out.print(
            f"report: {page}" if page.exists() else f"no report yet: harness report {document['study']}", soft_wrap=True
        )

    return Answer(answer, show)


def _status_rows(data: "StudyData", compared: "pd.DataFrame") -> Iterable[list[str]]:
    scores, baseline = data.primary(), data.document["baseline"]
    verdicts = {(row["task"], row["variant"]): row["verdict"] for row in compared.to_dict("records")}
    for task in data.document["tasks"]:
        for variant in data.document["variants"]:
            runs = data.runs[(data.runs["task"] == task) & (data.runs["variant"] == variant)]
            own = scores.loc[(scores["task"] == task) & (scores["variant"] == variant), "score"]
            ended = (~runs["status"].isin(("missing", "partial"))).sum()
            verdict = "baseline" if variant == baseline else verdicts.get((task, variant), "")
            yield [task, variant, f"{ended}/{len(runs)}", f"{own.mean():.3f}" if own.notna().any() else "", verdict]


def _compared(data: "StudyData") -> "pd.DataFrame":
    """The report's comparison: over all planned runs, so that the correction is the whole study's from the start."""
    from harness.stats import compare

    cells = ["variant", "task", "seed"]
    scores = data.runs[cells].merge(data.primary(), on=cells, how="left").astype({"score": "float64"})
    document = data.document
    return compare(scores, document["baseline"], document["margin"], higher_is_better=document["higher_is_better"])


def _conducted_by(folder: Path) -> dict[str, Any] | None:
    """The process that holds a study's lock; None if nobody does."""
    import fcntl

    if not (folder / "lock").exists():
        return None
    with (folder / "lock").open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            try:
                return dict(json.loads(file.read()))
            except json.JSONDecodeError:  # it is about to write who it is
                return {}
    return None


def _load(options: argparse.Namespace) -> "StudyData":
    from harness.locate import study_name
    from harness.results import load_study

    name = study_name(options.study)
    if not (options.results / name / "study.json").exists():
        known = [folder.name for folder in studies(options.results)]
        raise UserError(
            f"there is no study {name!r} in {options.results}; "
            + (nearest(name, known) if known else f"run `harness ablate {name}` first")
        )
    return load_study(options.results / name)


def studies(results: Path) -> list[Path]:
    """The folders of all studies in a results folder."""
    return sorted(path.parent for path in results.glob("*/study.json"))


def catalogue(options: argparse.Namespace) -> Answer:
    """What there is."""
    with importing():
        from harness import catalogue as entries

    document = entries.document(options.what)

    def show() -> None:
        from harness.progress import console, table

        out = console(sys.stdout)
        for path, levels in document.get("components", {}).items():
            out.print(f"\n{path}", style="bold")
            out.print(table(["level", "what…", "paper…", "fields…"], map(_level_row, levels)))
        if "sizes" in document:
            out.print("\nnumbers", style="bold")
            out.print(table(["field", "default…"], ([size["name"], _default(size)] for size in document["sizes"])))
        if "tasks" in document:
            out.print("\ntasks", style="bold")
            out.print(
                table(
                    ["task", "what…", "fields…"],
                    ([row[0], row[1], row[3]] for row in map(_level_row, document["tasks"])),
                )
            )
        if "ablations" in document:
            out.print("\nablations", style="bold")
            for ablation in document["ablations"]:
                out.print(f"harness ablate {ablation['name']}: {ablation['question'] or ablation['error']}")
                for key in ("claims", "axes", "variants", "tasks", "budgets"):
                    if ablation[key]:
                        out.print(f"  {key}: {', '.join(ablation[key])}")

    return Answer(document, show)


def _level_row(level: dict[str, Any]) -> list[str]:
    fields = "; ".join(f"{field['name']} = {_default(field)}" for field in level["fields"])
    return [level["name"], level["what"], "; ".join(level["papers"]), fields]


def _default(field: dict[str, Any]) -> str:
    return field["default"] + (f" ({field['bounds']})" if field["bounds"] else "")


def doctor(options: argparse.Namespace) -> Answer:
    """What works here."""
    from harness.doctor import FAIL, examine

    checks = examine(options.results, options.tracking_uri)
    ill = any(check.state == FAIL for check in checks)

    def show() -> None:
        from harness.progress import console, table

        rows = ([check.state, check.name, check.found, check.remedy] for check in checks)
        console(sys.stdout).print(table(["", "what", "found…", "remedy…"], rows))

    document = {"checks": [asdict(check) for check in checks], "ok": not ill}
    return Answer(document, show, INCOMPLETE if ill else DONE)


def dashboard(options: argparse.Namespace) -> Answer:
    """Serve MLflow's pages until Ctrl-C."""
    from harness import dashboard as pages

    with pages.dashboard(options.results, options.port) as served:
        print(f"MLflow at {served.address} (this machine only); Ctrl-C ends it", file=sys.stderr)
        for link in served.links:
            print(f"  {link.text}: {link.address}", file=sys.stderr)
        try:
            code = served.wait()
        except KeyboardInterrupt:
            code = DONE
    return Answer({}, lambda: None, code)


def sync(options: argparse.Namespace) -> Answer:
    """Deliver every study in the results folder to the store it was run with, or to the one that is named."""
    from harness.tracking import Mirror, StoreError, default_uri
    from harness.tracking.uri import check

    if options.tracking_uri:
        check(options.tracking_uri)
    delivered, failed = {}, {}
    for folder in studies(options.results):
        try:
            uri = options.tracking_uri or _recorded_uri(folder) or default_uri(options.results)
            delivered[folder.name] = Mirror(uri, folder).deliver()
        except (StoreError, UserError) as error:  # the others are delivered all the same
            failed[folder.name] = str(error)

    def show() -> None:
        for name, count in delivered.items():
            print(f"{name}: " + (f"{count} runs delivered" if count else "nothing was missing"))
        for name, cause in failed.items():
            print(f"{name}: not delivered: {cause}; run this again when that is mended", file=sys.stderr)
        if not delivered and not failed:
            print(f"there is no study in {options.results}", file=sys.stderr)

    return Answer({"delivered": delivered, "failed": failed}, show, INCOMPLETE if failed else DONE)


def _recorded_uri(folder: Path) -> str | None:
    """The tracking store that a study's last `ablate` named, if it named any."""
    try:
        document = json.loads((folder / "study.json").read_text())
    except json.JSONDecodeError as error:
        raise UserError(f"its study.json is corrupt ({error}); run the study again, finished runs are kept") from error
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tracking-uri")
    uri: str | None = parser.parse_known_args(shlex.split(document.get("command", "")))[0].tracking_uri
    if uri and "…@" in uri:
        raise UserError(
            f"{folder.name} was delivered to {uri}, whose password is not kept; name it with --tracking-uri"
        )
    return uri


def rows_of(frame: "pd.DataFrame") -> list[dict[str, Any]]:
    """A DataFrame as a list of rows."""
    return [{str(name): value for name, value in row.items()} for row in frame.to_dict("records")]
