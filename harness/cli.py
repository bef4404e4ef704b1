"""The command line: arguments in, an answer or one sentence out; what commands do is in `commands`.

What a command was asked for goes to stdout, as a table or with `--json` as one JSON document and nothing else;
progress, notices and errors go to stderr. (DESIGN.md sends tables to stderr, which is kept for those of a running
study; the answers of `list`, `status`, `doctor` and `--plan` must survive `| head` and `> file`.) With `--json` an
error is a document too: `{"error": …, "exit_code": …}`.

argparse instead of typer: a usage error is one sentence of ours, and `--help` costs a third of the time.
"""

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NoReturn

from harness import commands
from harness.commands import INTERRUPTED, Answer
from harness.schema import UserError, nearest
from harness.wording import full_disk

REFUSED, BUG, BROKEN_PIPE = 2, 70, 141

EPILOG = """exit codes: 0 done; 1 the study finished with failed runs (diagnose, doctor: something is wrong; sweep: a
variant has no setting that trains; sync: something was not delivered; status of all: a plan is corrupt); 2 a mistake in
the request, said in one sentence; 130 interrupted, state saved; 70 a bug."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without ≥ shows ? instead
    try:
        code = attempt(given)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # the reader (head, a pager) has seen enough
        silence = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(silence, stream.fileno())
        return BROKEN_PIPE


def attempt(given: list[str]) -> int:
    """Run a command; whatever goes wrong becomes a sentence and an exit code."""
    as_json = "--json" in given
    try:
        return dispatch(given)
    except UserError as error:
        return _complain(str(error), REFUSED, as_json)
    except KeyboardInterrupt:
        return _complain("interrupted; what was done is saved", INTERRUPTED, as_json)
    except BrokenPipeError:
        raise
    except Exception as error:
        if sentence := full_disk(error):
            return _complain(sentence, REFUSED, as_json)
        import traceback

        traceback.print_exc()
        return _complain(f"this is a bug of harness: {type(error).__name__}: {error}", BUG, as_json)


def dispatch(given: list[str]) -> int:
    """Parse the arguments, run the command, print its answer."""
    options = parse(given)
    options.typed = shlex.join(["harness", *given])
    with redirect_stdout(sys.stderr):  # what users' files print is no part of the answer
        answer: Answer = options.run(options)
    if options.json:
        print(json.dumps(plain(answer.document), indent=1))
    else:
        answer.show()
    return answer.exit_code


def _complain(sentence: str, code: int, as_json: bool) -> int:
    sentence = " ".join(sentence.split())
    print(f"harness: {sentence}", file=sys.stderr)
    if as_json:
        print(json.dumps({"error": sentence, "exit_code": code}))
    return code


# Arguments


class Parser(argparse.ArgumentParser):
    """An argument parser whose every complaint is a `UserError` of one sentence."""

    def __init__(self, **options: Any) -> None:
        super().__init__(formatter_class=_formatter, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        sentence = message.removeprefix("argument ").replace("the following arguments are required: ", "missing: ")
        raise UserError(f"{sentence}; see `{self.prog} --help`")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            option = f"{'/'.join(action.option_strings)}: " if action.option_strings else ""
            what = "" if option else f"{str(action.metavar).lower()} "
            known = list(map(str, action.choices))
            raise UserError(f"{option}there is no {what}{value!r}; {nearest(str(value), known)}")

    def known_options(self) -> list[str]:
        """All options that it takes."""
        return [option for action in self._actions for option in action.option_strings if option.startswith("--")]


def _formatter(prog: str) -> argparse.HelpFormatter:
    from rich_argparse import RichHelpFormatter

    formatter = RichHelpFormatter(prog, max_help_position=32)
    formatter._action_max_length = len("    dashboard  ")  # argparse forgets that the commands are indented
    return formatter


def parse(given: Sequence[str]) -> argparse.Namespace:
    """The options of a command; `run` is its function.

    Raises:
        UserError: an unknown command or option, a missing or impossible value.
    """
    parser, parsers = build_parser()
    options, unknown = parser.parse_known_args(given)
    if options.command is None:
        raise UserError(f"name a command ({', '.join(parsers)}); `harness --help` says what they do")
    if unknown:
        command = parsers[options.command]
        if unknown[0].startswith("-"):
            raise UserError(
                f"{command.prog}: there is no option {unknown[0]}; {nearest(unknown[0], command.known_options())}"
            )
        raise UserError(f"{command.prog}: {unknown[0]!r} is one argument too many; see `{command.prog} --help`")
    return options


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser, and those of the commands by name."""
    parser = Parser(prog="harness", description="An ablation harness for Transformers.", epilog=EPILOG)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", prog="harness", parser_class=Parser)
    made: dict[str, Parser] = {}

    def command(name: str, run: Callable[[argparse.Namespace], Answer], what: str) -> Parser:
        made[name] = subparsers.add_parser(name, help=what, description=what)
        made[name].set_defaults(run=run, json=False)
        return made[name]

    _study_options(command("ablate", commands.ablate, "Run what is left of a study, then write its report."))
    _sweep_options(command("sweep", commands.sweep, "Tune named fields for each variant, with equal budgets; resumes."))
    one = command("report", commands.report, "Rewrite a study's report from its records.")
    _add_name(one)
    one.add_argument(
        "--publish", action="store_true", help="write the small form into DIR/reference/NAME, to be committed"
    )
    _add_name(command("status", commands.status, "Show what is done of a study, or of all."), nargs="?")
    one = command("list", commands.catalogue, "Show what there is, with papers, fields and defaults.")
    parts = ("components", "tasks", "ablations", "presets", "probes", "answers")
    one.add_argument(
        "what", nargs="?", choices=parts, help=f"only {', '.join(parts[:-1])} or {parts[-1]}", metavar="PART"
    )
    _add_load(one)
    one = command("cost", commands.cost, "Count parameters, operations and bytes of a model without training it.")
    one.add_argument(
        "model", metavar="SPEC_OR_PRESET", help="a preset (`harness list presets`) or a file with a spec as JSON"
    )
    one.add_argument(
        "--length",
        type=_count,
        nargs="+",
        metavar="N",
        help="tokens of a sequence, of an encoder-decoder's source and as many of its answer; default: 512 2048 8192, "
        "up to what its positions take",
    )
    one.add_argument("--vocab", type=_count, metavar="N", help="words; default: the preset's or the task's, else 32000")
    one.add_argument(
        "--number", choices=("fp32", "bf16", "fp16"), default="fp16", help="of scores and caches; default: fp16"
    )
    _add_load(one)
    one = command("diagnose", commands.diagnose, "Name what is wrong with a spec's model, or with a run's.")
    one.add_argument(
        "run_name", metavar="RUN", nargs="?", help="a fingerprint, an MLflow run id, or a run's folder or checkpoint"
    )
    one.add_argument("--spec", metavar="SPEC_OR_PRESET", help="its untrained model, instead of a run")
    one.add_argument("--overfit", action="store_true", help="also try to learn one batch (200 steps)")
    _add_load(one)
    one = command(
        "compare", commands.compare, "Show what differs between runs, or between studies, and what came of it."
    )
    one.add_argument(
        "names",
        metavar="NAME",
        nargs="+",
        help="runs (fingerprint, MLflow run id or folder), or studies (name in the results folder, or folder)",
    )
    _claims_options(command("claims", commands.claims, "Judge the articles' claims by what the records hold."))
    one = command("doctor", commands.doctor, "Show what works on this machine and what does not.")
    _add_tracking(one)
    one = command("dashboard", commands.dashboard, "Serve MLflow's pages on the local store, to this machine only.")
    one.add_argument("--port", type=_port, metavar="N", help="default: 5000, or any free one")
    one = command("sync", commands.sync, "Deliver to the tracking store what it has not received.")
    _add_tracking(one)
    for name, one in made.items():
        one.add_argument("--results", type=_folder, default=Path("results"), metavar="DIR", help="default: ./results")
        if name != "dashboard":
            one.add_argument("--json", action="store_true", help="print one JSON document on stdout and nothing else")
    return parser, made


def _add_load(parser: Parser) -> None:
    parser.add_argument(
        "--load", type=Path, action="append", default=[], metavar="FILE", help="your own file, with levels or tasks"
    )


def _study_options(parser: Parser) -> None:
    parser.add_argument("study", metavar="NAME_OR_FILE", help="an ablation (`harness list ablations`) or your own file")
    parser.add_argument("--budget", metavar="NAME", help="smoke, quick or full; default: quick, or the only one")
    parser.add_argument("--seeds", type=_count, metavar="N", help="default: as many as the budget says")
    parser.add_argument(
        "--pilot",
        action="store_true",
        help="seeds from 1000 on, to choose settings: a study NAME-pilot without verdicts",
    )
    parser.add_argument(
        "--until",
        choices=("decided",),
        help="give what is undecided more seeds, twice as many each time, up to the cap, at the same error rate",
    )
    parser.add_argument(
        "--cap", type=_count, metavar="N", help="most seeds with --until; default: 4 times as many as at first"
    )
    parser.add_argument(
        "--tuned",
        action="store_true",
        help="each variant with the settings that `harness sweep` found for it: a study NAME-tuned",
    )
    _add_machine(parser)
    parser.add_argument(
        "--no-diagnostics", action="store_true", help="neither probe models nor watch them train; records say so"
    )
    parser.add_argument("--plan", action="store_true", help="show what would run and what it would cost; write nothing")


def _add_machine(parser: Parser) -> None:
    """Where runs are run, and where they are told of."""
    parser.add_argument(
        "--jobs", type=_jobs, default="auto", metavar="N", help="worker processes; default: one a core, or one on a GPU"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: a GPU if there is one"
    )
    _add_tracking(parser)


def _sweep_options(parser: Parser) -> None:
    parser.add_argument("study", metavar="NAME_OR_FILE", help="an ablation (`harness list ablations`) or your own file")
    parser.add_argument("--trials", type=_count, metavar="N", help="settings a variant; default: 20, or a grid's size")
    parser.add_argument("--budget", metavar="NAME", help="of each run: smoke, quick or full; default: as for ablate")
    parser.add_argument("--seeds", type=_count, metavar="N", help="pilot seeds a setting; default: what its space says")
    parser.add_argument("--sampler", choices=("tpe", "random", "grid"), default="tpe", help="default: tpe")
    parser.add_argument("--no-pruning", action="store_true", help="train every setting to the end")
    parser.add_argument(
        "--cost",
        choices=("flops", "parameters"),
        action="append",
        help="a further objective, for a Pareto front; default: what the ablation's space says",
    )
    parser.add_argument(
        "--storage",
        metavar="URL",
        help="a database that several machines share (postgresql+psycopg://user@host/name); default: a file",
    )
    _add_machine(parser)


def _claims_options(parser: Parser) -> None:
    parser.add_argument("ids", metavar="ID", nargs="*", help="only these, one of them whole (E37); default: all")
    parser.add_argument(
        "--run",
        dest="lacking",  # `run` is the command's function
        action="store_true",
        help="train the studies that are missing and run the tests behind laws, then judge",
    )
    parser.add_argument(
        "--publish",
        action="store_true",
        help="write claims.md and claims.json into DIR/reference, from published records alone, to be committed",
    )
    _add_machine(parser)


def _add_name(parser: Parser, nargs: str | None = None) -> None:
    what = "a study in the results folder" + (" (default: one line for each)" if nargs else "")
    parser.add_argument("study", metavar="NAME", nargs=nargs, help=what)


def _add_tracking(parser: Parser) -> None:
    parser.add_argument("--tracking-uri", metavar="URI", help="default: the store in the results folder")


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _jobs(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return _count(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, nor 'auto'") from error


def _folder(text: str) -> Path:
    return Path(text).expanduser()


def _port(text: str) -> int:
    if _count(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is above 65535")
    return int(text)


def plain(data: Any) -> Any:
    """Data as JSON knows it: numbers that are none (NaN, infinite) become null."""
    if isinstance(data, dict):
        return {str(key): plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [plain(value) for value in data]
    if hasattr(data, "item"):  # numpy's numbers
        data = data.item()
    return None if isinstance(data, float) and not math.isfinite(data) else data
