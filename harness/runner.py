"""RunSpec → RunRecord: trains, evaluates, resumes. Never prints; a run that fails is a record, not an exception."""

import itertools
import json
import logging
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytorch_lightning as pl
import torch

from harness.backend import attention_backend
from harness.cost import active_parameters, check_countable, inference_costs, parameters, training_flops
from harness.diagnostics.contract import contract_of
from harness.diagnostics.structure import structural, unseen, watched
from harness.diagnostics.subject import subject_of
from harness.diagnostics.watch import PROBED, Watch
from harness.evaluate import (
    GATE,
    all_lengths,
    answer_metrics,
    greedy_agreement,
    read_lengths,
    read_training_samples,
    score_readings,
    zero_scores,
)
from harness.journal import Diverged, Interrupted, Journal, Progress, evaluating
from harness.machine import environment, peak_memory, reset_peak_memory
from harness.module import TransformerModule, answer_loss
from harness.record import RunRecord, Score, Status, mean_score, read_curves, set_aside, write_atomically
from harness.rungs import Pruned, Rungs, leave_nothing_to_resume
from harness.schema import UserError, shown
from harness.seeding import seed_global
from harness.spec import RunSpec
from harness.transformer import buffers_kept
from harness.wording import full_disk, in_words

__all__ = ["Interrupted", "Progress", "Pruned", "run"]

WORSE = 1.25  # times the untrained loss, which is about that of guessing: no noise of a batch gets there

logger = logging.getLogger("harness")
logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)  # `run` never prints; records say what was done


def run(
    spec: RunSpec,
    *,
    directory: str | Path | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
    on_notice: Callable[[str], None] = logger.warning,
    diagnose: bool = True,
    probes: str | Path | None = None,
    rungs: tuple[int, ...] = (),
    go_on: Callable[[int, float], bool] | None = None,
) -> RunRecord:
    """Train and evaluate what a spec describes, or what is left of it, and record the outcome.

    Args:
        spec: the run; on one machine its record is a function of it, to the bit.
        directory: where curves, attention maps, checkpoint and record are kept; a run found there is resumed, a
            finished one is only read. Without it nothing is left on disk.
        on_progress: called every few steps.
        should_stop: asked every few steps; when it says yes the run is saved and `Interrupted` raised.
        on_notice: told in a sentence what a person should know, such as a corrupt file set aside.
        diagnose: whether training is watched by the detectors of `harness.diagnostics`; the record says so.
        probes: where what structural probes find in the untrained model is kept, once for all seeds; without it they
            are left out.
        rungs: steps at which `go_on` is asked, with the step and the loss at the training lengths there.
        go_on: when it says no the run is given up and `Pruned` raised; its curves are kept, and no record.

    Raises:
        Pruned: `go_on` said no.
        Interrupted: after saving, when `should_stop` said yes.
        OSError: the disk is full, or takes no writes any more.
        UserError: `spec` is no RunSpec, this machine cannot run it (no CUDA device, an attention kernel that cannot
            run), or the directory cannot be made or holds the run of another spec.
    """
    if not isinstance(spec, RunSpec):
        raise UserError(f"run takes a RunSpec, not {shown(spec)}; make one, e.g. RunSpec(task=Copy())")
    if directory is None:
        with TemporaryDirectory() as temporary:
            return run(
                spec,
                directory=temporary,
                on_progress=on_progress,
                should_stop=should_stop,
                diagnose=diagnose,
                probes=probes,
                rungs=rungs,
                go_on=go_on,
            )
    if directory == "":
        raise UserError("directory = '': name a folder, or leave it out to keep nothing")
    directory = Path(directory)
    if _spec_in(directory, on_notice) not in (None, spec.document()):
        raise UserError(f"{directory} holds the run of another spec; name another directory")
    if (directory / "record.json").exists():
        return RunRecord.read(directory / "record.json")
    if probes is not None and Path(probes).exists() and not Path(probes).is_dir():
        raise UserError(f"probes = '{probes}': this is a file; name a folder")
    if spec.device == "cuda" and not torch.cuda.is_available():
        raise UserError("device = 'cuda': torch sees no CUDA device here; use 'cpu'")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"directory = '{directory}': cannot be made ({error.strerror}); name another") from error
    write_atomically(directory / "spec.json", json.dumps(spec.document(), indent=1))
    journal, kept = Journal(spec, directory, on_progress, should_stop), Path(probes) if diagnose and probes else None
    attempt = _Attempt(spec, directory, journal, on_notice, diagnose=diagnose, probes=kept)
    attempt.rungs = Rungs(spec, rungs, go_on) if go_on else None
    try:
        record = attempt.record()
    except Pruned:
        leave_nothing_to_resume(directory)
        raise
    record.write(directory / "record.json")
    (directory / "checkpoint.ckpt").unlink(missing_ok=True)
    return record


def _spec_in(directory: Path, notify: Callable[[str], None]) -> Any:
    """The spec document of the run that a directory holds; None if it holds none, or none that can be read:
    then the directory is taken for that of the run that is to be run there.
    """
    path, record = directory / "spec.json", directory / "record.json"
    if path.exists():
        try:
            return json.loads(path.read_text())
        except ValueError:
            _put_away(path, "the run goes on without it", notify)
    return RunRecord.read(record).spec if record.exists() else None


def _put_away(path: Path, remedy: str, notify: Callable[[str], None]) -> None:
    """Set a corrupt file aside, and tell."""
    notify(f"{path} is corrupt; kept as {set_aside(path).name}, {remedy}")


class _Attempt:
    """One attempt at a run, and what is known of it so far."""

    def __init__(
        self,
        spec: RunSpec,
        directory: Path,
        journal: Journal,
        notify: Callable[[str], None],
        *,
        diagnose: bool,
        probes: Path | None,
    ) -> None:
        self.spec, self.directory, self.journal, self.notify = spec, directory, journal, notify
        self.started = time.time()
        self.scores: tuple[Score, ...] = ()
        self.greedy = self.initial_loss = float("nan")
        self.answers = answer_metrics(spec, fresh={}, seen={})
        self.ledger: dict[str, int | float | str] = {"device": spec.device, "precision": spec.precision}
        self.diagnose, self.probes = diagnose, probes
        self.watch: Watch | None = None
        self.rungs: Rungs | None = None

    def record(self) -> RunRecord:
        """The outcome, with what diagnostics make of it."""
        before = structural(self.spec, self.probes) if self.probes else ()
        record = self._record()
        if not self.diagnose:
            return record
        try:
            after = watched(self.spec, read_curves(self.directory / "curves.jsonl"), record, before)
        except Exception as error:  # a trained model is not lost for what is made of its curves
            after = (unseen("detectors", in_words(error)),)
        if self.watch is not None and self.watch.trouble:
            after += (unseen("watch", self.watch.trouble),)
        return record.model_copy(update={"findings": before + after})

    def _record(self) -> RunRecord:
        status, cause = self._outcome()
        gpu = {"gpu": torch.cuda.get_device_name()} if self.spec.device == "cuda" else {}
        return RunRecord(
            fingerprint=self.spec.fingerprint(),
            spec=self.spec.document(),
            status=status,
            cause=cause,
            scores=self.scores,
            final=self._final(),
            ledger=self.ledger,
            environment=environment() | gpu,
            started=self.started,
            ended=time.time(),
        )

    def _outcome(self) -> tuple[Status, str]:
        """Train and evaluate; whatever goes wrong becomes a status and its cause."""
        try:
            module = TransformerModule(self.spec).to(self.spec.device)
            self._observe(module)
            fit(module, self._callbacks(module), _sound(self.directory / "checkpoint.ckpt", self.notify))
            self._measure(module.to(self.spec.device))
            return self._verdict()
        except (Interrupted, Pruned, UserError):
            raise
        except Diverged as error:
            self.scores = zero_scores(self.spec)
            return "diverged", str(error)
        except Exception as error:
            self.scores, self.answers, self.greedy = (), answer_metrics(self.spec, fresh={}, seen={}), float("nan")
            if _is_out_of_memory(error):
                return "out_of_memory", in_words(error)
            if full_disk(error):  # no outcome of the run: it goes on from its checkpoint
                raise
            logger.exception("run %s failed", self.spec.fingerprint())
            return "failed", in_words(error)

    def _observe(self, module: TransformerModule) -> None:
        """What can be known before training."""
        reset_peak_memory()
        seed_global(self.spec.seed, "observe")
        with buffers_kept(module.model):
            self.initial_loss = initial_loss(module)
            backend, reason = attention_backend(self.spec, module.model)
        self.spec.train.kernel.check(backend, reason)
        self.ledger |= {"attention_backend": backend, "attention_reason": reason}
        self.ledger |= {"parameters": parameters(module.model), "active_parameters": active_parameters(module.model)}
        check_countable(self.spec)

    def _callbacks(self, module: TransformerModule) -> list[pl.Callback]:
        """The watch comes first: the journal writes what it sees."""
        spec, looked = self.spec, "off"
        callbacks: list[pl.Callback] = [self.journal]
        if self.diagnose:
            task = spec.task
            probe = task.batch(0, "probe", 0, PROBED, task.lengths.train[1], module.device, spec.layout)
            self.watch = Watch(
                subject_of(spec, module), contract_of(spec, module.model), steps=spec.train.steps, probe=probe
            )
            self.journal.watched, looked = self.watch.take, "structure, training" if self.probes else "training"
            callbacks = [self.watch, self.journal]
        if self.rungs:
            callbacks.append(self.rungs)
        self.ledger["diagnostics"] = looked
        return callbacks

    def _measure(self, module: TransformerModule) -> None:
        """What can be known after training."""
        spec, journal = self.spec, self.journal
        seconds, samples = journal.seconds, spec.train.eval_samples
        torch.save(module.model.state_dict(), self.directory / "model.pt")
        with evaluating(module):
            fresh = read_lengths(module, spec, all_lengths(spec.task), stream="eval", samples=samples)
            seen = read_training_samples(module, spec, samples=samples)
            self.scores, self.answers = score_readings(spec, fresh), answer_metrics(spec, fresh, seen)
            self.greedy = greedy_agreement(module.model, spec)
        counted = list(journal.sequences.items())
        self.ledger |= {
            "steps": spec.train.steps,
            "tokens": sum((tokens + source) * count for (tokens, source), count in counted),
            "flops": training_flops(spec, counted),
            **inference_costs(spec),
            "wall_seconds": seconds,
            "peak_memory_bytes": torch.cuda.max_memory_allocated() if spec.device == "cuda" else peak_memory(),
        }

    def _verdict(self) -> tuple[Status, str]:
        """Finished, unless training has made the model worse than it was at the start."""
        last, first = read_curves(self.directory / "curves.jsonl")[-1]["train/loss"], self.initial_loss
        if last > WORSE * first:
            return "diverged", f"the training loss ended at {last:.3g}, far above its start at {first:.3g}"
        return "finished", ""

    def _final(self) -> dict[str, float]:
        lengths = self.spec.task.lengths
        lines = [line for line in read_curves(self.directory / "curves.jsonl") if "train/loss" in line]
        learned = [line["step"] for line in lines if line["train/exact_match"] >= GATE]
        return {
            "eval/in_distribution": mean_score(self.scores, lengths.training),
            "eval/extrapolation": mean_score(self.scores, lengths.test),
            "eval/greedy_agreement": self.greedy,
            **self.answers,
            "train/loss": lines[-1]["train/loss"] if lines else float("nan"),
            "train/initial_loss": self.initial_loss,
            "train/steps_to_threshold": min(learned, default=float("nan")),
        }


def fit(module: TransformerModule, callbacks: list[pl.Callback], checkpoint: Path | None) -> None:
    """Train to the end, from a checkpoint if there is one."""
    spec = module.spec
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's advice on loaders and loggers that we leave out on purpose
        trainer = pl.Trainer(
            accelerator="gpu" if spec.device == "cuda" else "cpu",
            devices=1,
            precision="bf16-mixed" if spec.precision == "bf16" else "32-true",
            max_steps=spec.train.steps,
            max_epochs=-1,
            callbacks=callbacks,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        with _own_interrupt():
            trainer.fit(module, itertools.repeat(0), ckpt_path=checkpoint, weights_only=True)


class _own_interrupt:
    """Keeps Ctrl-C a KeyboardInterrupt: Lightning turns it into SystemExit and leaves the signal ignored."""

    def __enter__(self) -> None:
        main = threading.current_thread() is threading.main_thread()
        self.handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)} if main else {}

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        for number, handler in self.handlers.items():
            signal.signal(number, handler)
        if isinstance(error, SystemExit) and isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error


def _sound(checkpoint: Path, notify: Callable[[str], None]) -> Path | None:
    """The checkpoint if it can be read; a corrupt one is set aside, with a notice, and the run starts anew."""
    if not checkpoint.exists():
        return None
    try:
        torch.load(checkpoint, weights_only=True, map_location="cpu")
    except Exception:  # a torn or foreign file raises almost anything
        _put_away(checkpoint, "the run starts anew", notify)
        return None
    return checkpoint


@torch.no_grad()
def initial_loss(module: TransformerModule) -> float:
    """The untrained model's loss on the first training batch, in nats."""
    batch = module.batch(0)
    with module.autocast():
        return answer_loss(module(*batch.reading), batch.targets).item()


def _is_out_of_memory(error: Exception) -> bool:
    # torch's CPU allocator raises a plain RuntimeError with these words
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in str(error)
