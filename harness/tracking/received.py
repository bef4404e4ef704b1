"""What a tracking store has received of a run: `mirror.json`, written after every step that the store has confirmed."""

import logging
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from harness.record import set_aside, write_atomically
from harness.tracking.uri import store_key

FILE = "mirror.json"

logger = logging.getLogger("harness")


class Label(BaseModel):
    """A run's place in its study, noted when it is first seen: a later plan may no longer contain it."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    variant: str
    task: str
    seed: int
    budget: str

    @property
    def name(self) -> str:
        """How people call the run: `rope · copy · seed 3`."""
        return f"{self.variant} · {self.task} · seed {self.seed}"


class Received(BaseModel):
    """What one store has of one run.

    Attributes:
        began: unix ms of the first thing that happened in the run; another value on disk means that it was done anew.
        lines: so many lines of `curves.jsonl` have arrived, and the parameters with the first of them.
        images: steps whose attention maps have arrived.
        files: artifacts that have arrived, each with the size and time of the version sent.
        texts: descriptions and other tags that may change, as last sent.
        views: tags of the experiment that save views of its pages, as last sent.
        outcome: unix ms of the end of the record whose scores, metrics and ledger have arrived; 0 before.
        status: MLflow's status as last sent.
    """

    model_config = ConfigDict(extra="forbid")
    experiment_id: str
    run_id: str
    began: int = 0
    params: bool = False
    lines: int = 0
    images: list[int] = []
    files: dict[str, str] = {}
    texts: dict[str, str] = {}
    views: dict[str, str] = {}
    outcome: int = 0
    status: str = "RUNNING"


class RunMirror(BaseModel):
    """`runs/<fingerprint>/mirror.json`: the run's label, and what each store has of it, last the one used last.

    `run_id` is the run's id in that one, for readers who ask for no more.
    """

    model_config = ConfigDict(extra="forbid")
    run_id: str = ""
    label: Label
    stores: dict[str, Received] = {}


class StudyMirror(BaseModel):
    """`<study>/mirror.json`: what each store has of the parent run of each budget."""

    model_config = ConfigDict(extra="forbid")
    stores: dict[str, dict[str, Received]] = {}


def read(folder: Path, kind: type[RunMirror] | type[StudyMirror]) -> RunMirror | StudyMirror | None:
    """The `mirror.json` of a folder, None if there is none; a corrupt one is set aside with a notice.

    Nothing is lost with it: runs are found again in the store by their tags, and what is sent twice arrives once.
    """
    path = folder / FILE
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:
        aside = set_aside(path)
        logger.warning("%s is corrupt; kept as %s, the tracking store is compared anew", path, aside.name)
        return None


def write(folder: Path, mirror: RunMirror | StudyMirror) -> None:
    """Write the `mirror.json` of a folder, whole or not at all."""
    write_atomically(folder / FILE, mirror.model_dump_json(indent=1))


def run_ids(study_folder: Path, uri: str | None = None) -> dict[str, str]:
    """MLflow's run ids by fingerprint: in the store of a URI, else each in the store that was used last."""
    found = {}
    for path in sorted(study_folder.glob(f"runs/*/{FILE}")):
        try:
            stores = RunMirror.model_validate_json(path.read_bytes()).stores
        except ValidationError:
            continue  # the next delivery sets it aside
        key = next(reversed(stores), "") if uri is None else store_key(uri, study_folder)
        if key in stores:
            found[path.parent.name] = stores[key].run_id
    return found
