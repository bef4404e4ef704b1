"""Where Optuna keeps what it was told: a file, or a database that several machines share."""

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import FrozenTrial
from sqlalchemy.pool import NullPool

from harness.record import write_atomically
from harness.schema import UserError, shown
from harness.wording import in_words

HEARTBEAT, GRACE = 10, 40  # seconds between signs of life in a database, and after which a trial counts as abandoned
FIELDS = "fields"  # how many a trial has: an attribute of each study

optuna.logging.set_verbosity(optuna.logging.WARNING)


def open_storage(url: str | None, folder: Path) -> BaseStorage:
    """Optuna's storage: a journal in the sweep's folder, or a database that several machines share.

    Raises:
        UserError: the database cannot be reached, or its driver is missing.
    """
    if url is None:
        journal = folder / "journal.log"
        _mend(journal)
        return JournalStorage(JournalFileBackend(str(journal), JournalFileOpenLock(str(journal))))
    if "://" not in url:
        raise UserError(f"--storage {shown(url)}: this is no database; write postgresql+psycopg://user@host/name")
    from harness.tracking.uri import without_password

    with database(url), warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # heartbeats, pinned and tested
        try:
            return RDBStorage(
                url,
                engine_kwargs={"poolclass": NullPool},  # each call its own connection: none goes stale, none is left
                heartbeat_interval=HEARTBEAT,
                grace_period=GRACE,
                heartbeat_stale_trial_callback=try_again,
            )
        except RuntimeError as error:  # of tables with another version; MLflow's have that one's name, too
            reason = f"its tables are not those of this Optuna ({in_words(error)})"
            raise UserError(f"--storage {without_password(url)}: {reason}; give it a database of its own") from error


@contextlib.contextmanager
def closing(store: BaseStorage) -> Iterator[BaseStorage]:
    """Gives a database's connections back."""
    try:
        yield store
    finally:
        store.remove_session()
        if isinstance(store, RDBStorage):
            store.engine.dispose()


def _mend(journal: Path) -> None:
    """Remove what a kill has torn. The caller holds the sweep's lock, so that nobody else writes."""
    journal.with_name(f"{journal.name}.lock").unlink(missing_ok=True)
    if not journal.exists():
        return
    content = journal.read_bytes()
    if content and not content.endswith(b"\n"):
        write_atomically(journal, content[: content.rfind(b"\n") + 1])


def try_again(study: optuna.Study, trial: FrozenTrial) -> None:
    """Put the parameters of a trial that was interrupted up to be tried again. One that was cut off while it was asked
    for has not drawn them all: it leaves nothing, for the sampler draws the same ones anew.
    """
    if len(trial.params) < study.user_attrs[FIELDS] and "fixed_params" not in trial.system_attrs:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        RetryHeartbeatStaleTrialCallback()(study, trial)


@contextlib.contextmanager
def database(url: str) -> Iterator[None]:
    """Says in a sentence what is wrong with a database."""
    from harness.tracking.uri import without_password

    try:
        yield
    except (optuna.exceptions.StorageInternalError, ImportError) as error:
        cause = error.__cause__ or error
        reason = without_password(in_words(cause))
    except Exception as error:
        if not type(error).__module__.startswith(("sqlalchemy", "psycopg", "alembic")):
            raise
        reason = without_password(in_words(error))
    else:
        return
    raise UserError(f"--storage {without_password(url)}: {reason}; mend that and run it again, what was told is kept")
