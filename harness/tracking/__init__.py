"""The mirror of every run in MLflow. The disk is the queue: what a store has not received still lies there.

`store` is the project's only import of mlflow, made when a store is first opened; the other modules know files and
plain data. A package instead of the one file that DESIGN.md draws, because what MLflow takes (`store`), what we say
about a run (`content`), what lies on disk (`disk`), what has been received (`received`), how the rest is sent
(`delivery`) and when (`mirror`) are things to be read one at a time.
"""

from harness.tracking.entities import StoreError
from harness.tracking.links import Link, compare_link, run_link, study_links, view_link
from harness.tracking.mirror import Mirror
from harness.tracking.received import run_ids
from harness.tracking.tree import TreeMirror
from harness.tracking.uri import default_uri, store_lock, without_password

__all__ = [
    "Link",
    "Mirror",
    "StoreError",
    "TreeMirror",
    "compare_link",
    "default_uri",
    "run_ids",
    "run_link",
    "store_lock",
    "study_links",
    "view_link",
    "without_password",
]
