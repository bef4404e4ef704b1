"""One tracking store through MLflow's client: the only import of mlflow in the project.

The import costs two to three seconds of CPU and a schema migration one more, so this module is imported when a store is
first opened. What MLflow raises becomes `StoreError`, which says whether the store does not answer or refuses the data.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.tracking.entities import Point, StoredRun, StoreError
from harness.tracking.uri import artifact_root, check, database_file, store_lock, without_password

# Read by mlflow when it is imported or called. Its own retries are off: the mirror tries again later, and a retried
# creation could create twice. A user's own settings win.
for _name, _value in {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
}.items():
    os.environ.setdefault(_name, _value)

from mlflow import MlflowClient  # noqa: E402 - after the settings that its import reads
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag, ViewType  # noqa: E402
from mlflow.exceptions import MlflowException  # noqa: E402
from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore  # noqa: E402

# Their messages would tear the progress table; what matters of them reaches people as StoreError.
for _noisy in ("mlflow", "alembic", "urllib3"):
    logging.getLogger(_noisy).setLevel(logging.CRITICAL)

BATCH = 1000  # metrics MLflow takes at once
PAGE = 1000
REFUSALS = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST", "PERMISSION_DENIED")


class Store:
    """A tracking store.

    Raises:
        UserError: a URI that cannot be one.
        StoreError: from every method, when the store cannot be reached or refuses.
    """

    def __init__(self, uri: str, results: Path) -> None:
        check(uri)
        self._artifacts = artifact_root(uri, results)
        file = database_file(uri)
        with _explained("opening it"), store_lock(uri):
            if file and not (file.exists() and file.stat().st_size):
                _create_database(file, str(self._artifacts))
            self._client = MlflowClient(uri)

    def experiment(self, name: str) -> str:
        """The id of an experiment, created if there is none, brought back if it was deleted."""
        with _explained(f"experiment {name!r}"):
            found = self._client.get_experiment_by_name(name)
            if found is None:
                place = str(self._artifacts / name) if self._artifacts else None
                tags = {"mlflow.experimentKind": "custom_model_development"}  # the pages for models, not for chats
                return str(self._client.create_experiment(name, artifact_location=place, tags=tags))
            if found.lifecycle_stage == "deleted":
                self._client.restore_experiment(found.experiment_id)
            return str(found.experiment_id)

    def tag_experiment(self, experiment_id: str, tags: Mapping[str, str]) -> None:
        """Set tags of an experiment: its description, its saved views."""
        with _explained("the experiment's tags"):
            for key, value in tags.items():
                self._client.set_experiment_tag(experiment_id, key, value)

    def runs(self, experiment_id: str) -> Iterator[StoredRun]:
        """All runs of an experiment that are not deleted."""
        token = None
        while True:
            with _explained("runs"):
                page = self._client.search_runs(
                    [experiment_id], run_view_type=ViewType.ACTIVE_ONLY, max_results=PAGE, page_token=token
                )
            for run in page:
                yield StoredRun(run.info.run_id, run.info.status, run.info.start_time, run.data.tags)
            token = page.token
            if not token:
                return

    def create(self, experiment_id: str, name: str, tags: Mapping[str, str], started: int) -> str:
        """A new run, RUNNING since `started` (unix ms); its id."""
        with _explained(name):
            run = self._client.create_run(experiment_id, start_time=started, tags=dict(tags), run_name=name)
        return str(run.info.run_id)

    def send(
        self,
        run_id: str,
        *,
        points: Sequence[Point] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Metrics (at most `BATCH`), parameters and tags in one call."""
        metrics = [Metric(p.key, p.value, p.time, p.step) for p in points]
        with _explained(f"run {run_id}"):
            self._client.log_batch(
                run_id,
                metrics=metrics,
                params=[Param(key, value) for key, value in (params or {}).items()],
                tags=[RunTag(key, value) for key, value in (tags or {}).items()],
                synchronous=True,
            )

    def name_data(self, run_id: str, name: str, digest: str, source: str) -> None:
        """Say what data a run is trained on."""
        data = DatasetInput(
            Dataset(name=name, digest=digest, source_type="generated", source=source),
            [InputTag("mlflow.data.context", "training")],
        )
        with _explained(f"run {run_id}"):
            self._client.log_inputs(run_id, [data])

    def upload(self, run_id: str, folder: Path) -> None:
        """All files of a folder as artifacts; a file of the same name is replaced."""
        with _explained(f"artifacts of run {run_id}"):
            self._client.log_artifacts(run_id, str(folder))

    def close(self, run_id: str, status: str, ended: int) -> None:
        """End a run: FINISHED, FAILED or KILLED at `ended` (unix ms)."""
        with _explained(f"run {run_id}"):
            self._client.set_terminated(run_id, status, end_time=ended)

    def reopen(self, run_id: str) -> None:
        """Set a run that had ended back to RUNNING."""
        with _explained(f"run {run_id}"):
            self._client.update_run(run_id, status="RUNNING")

    def remove(self, run_id: str) -> None:
        """Delete a run (MLflow keeps it restorable)."""
        with _explained(f"run {run_id}"):
            self._client.delete_run(run_id)


def _create_database(file: Path, artifacts: str) -> None:
    """Make an sqlite store in one step: a migration that is killed half-way leaves a file that can never be used."""
    partial = file.with_name(f".{file.name}.partial")
    partial.unlink(missing_ok=True)
    made = SqlAlchemyStore(f"sqlite:///{partial}", artifacts)
    made.engine.dispose()
    partial.replace(file)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Turn what MLflow and the libraries below it raise into `StoreError`."""
    try:
        yield
    except MlflowException as error:
        raise StoreError(f"{what}: {_sentence(error)}", refused=error.error_code in REFUSALS) from error
    except OSError as error:  # artifacts on disk; requests' errors are OSErrors too
        raise StoreError(f"{what}: {_sentence(error)}") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in ("sqlalchemy", "alembic", "sqlite3"):
            raise
        raise StoreError(f"{what}: {_sentence(error)}") from error


def _sentence(error: BaseException) -> str:
    """The first line, without the address of a Python object and the advice that follow."""
    text: Any = str(error).strip().splitlines() or [type(error).__name__]
    return without_password(str(text[0]))[:300]
