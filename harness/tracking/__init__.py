"""The mirror of every run in MLflow. The disk is the queue: what a store has not received is still there, to be sent later.

`store` is the project's only import of mlflow, made when a store is first opened and not before; the other modules know
files and plain data. A package instead of the one file that DESIGN.md draws, because what MLflow needs, what we say about
a run, what has been received, and when to send it are four things.
"""

from harness.tracking.entities import StoreError
from harness.tracking.links import Link, chart_link, compare_link, run_link, runs_link, study_links
from harness.tracking.mirror import Mirror
from harness.tracking.received import run_ids
from harness.tracking.uri import default_uri, store_lock

__all__ = [
    "Link",
    "Mirror",
    "StoreError",
    "chart_link",
    "compare_link",
    "default_uri",
    "run_ids",
    "run_link",
    "runs_link",
    "store_lock",
    "study_links",
]
