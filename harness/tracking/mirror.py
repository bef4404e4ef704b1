"""When a study is delivered to its store: live by a thread, or later, once. What and how is `delivery`'s."""

import logging
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from harness.locks import held, holder
from harness.tracking.delivery import Delivery
from harness.tracking.disk import StudyFolder
from harness.tracking.entities import StoreError
from harness.tracking.uri import check, store_key, without_password

CYCLE = 3.0  # seconds between deliveries
LONGEST_PAUSE = 60.0  # seconds between attempts while the store does not answer
PATIENCE = 30.0  # seconds to wait for another process that delivers

logger = logging.getLogger("harness")


class Mirror:
    """One study's mirror in one store.

    `deliver` may be called at any time and after any crash. `start` lets a thread do it every few seconds, and makes
    the study live until `close`: its runs that move are RUNNING. Those of a study that nobody runs are KILLED.
    """

    def __init__(self, uri: str, study_folder: Path) -> None:
        self.uri, self.folder = uri, study_folder
        self._key = store_key(uri, study_folder)
        self._delivery: Delivery | None = None
        self._thread: threading.Thread | None = None
        self._stop, self._hurry = threading.Event(), threading.Event()
        self._unfinished: str | None = None
        self._failures = 0
        self._ever_failed = False

    def prepare(self) -> None:
        """Check the URI, and nothing more.

        The store is opened, and if need be created under a lock, by the first delivery: MLflow's import and migration
        take seconds, which the workers need not wait for.

        Raises:
            UserError: a malformed URI, or a place that cannot be written.
        """
        check(self.uri)

    def pending(self) -> bool:
        """Whether there is anything on disk that the store has not confirmed; the store is not asked."""
        study, live = StudyFolder(self.folder), self._is_live()
        if study.document is None:
            return False
        runs = study.runs(besides=self._delivery.settled if self._delivery else ())  # labels those that are new
        parent = study.mirror.stores.get(self._key, {}).get(study.budget)
        return study.lacks(parent, live=live) or any(
            run.lacks(mirror.stores.get(self._key), live=live) for run, mirror in runs
        )

    def deliver(self) -> int:
        """Bring to the store all that it lacks; the number of runs of which something was sent.

        Raises:
            StoreError: the store cannot be reached or refuses; what it has is noted, the rest comes next time.
            UserError: a malformed URI; a corrupt study.json.
        """
        with self._alone():
            delivery = self._open()
            delivery.forget()
            return delivery.deliver(live=self._is_live())

    def reap(self) -> int:
        """End our runs that the store believes RUNNING although nobody runs this study; their number."""
        if self._is_live():
            return 0
        with self._alone():
            return self._open().reap()

    def start(self) -> None:
        """Deliver every few seconds in a daemon thread, after ending what a killed run left RUNNING."""
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        self._thread.start()

    def flush(self, timeout: float = 5.0) -> bool:
        """Have the thread deliver now, not at its next turn, and wait for it; whether the store then has everything."""
        end, failures = time.monotonic() + timeout, self._failures
        self._hurry.set()
        while self.pending():
            if time.monotonic() > end or self._failures > failures:
                return False
            time.sleep(0.1)
        return True

    def close(self, timeout: float = 15.0, status: Literal["FINISHED", "KILLED", "FAILED"] = "KILLED") -> bool:
        """Deliver a last time and stop; whether the store has everything.

        Args:
            timeout: seconds to wait at most; a store that hangs does not hold up the end.
            status: of the study's own run if a planned run has no record, or the study no report (else it is FINISHED).
        """
        self._unfinished = status
        self._stop.set()
        self._hurry.set()
        if self._thread is None:
            self.start()
        assert self._thread is not None
        self._thread.join(timeout)
        done = not self._thread.is_alive() and not self._failures
        if not done:
            store = without_password(self.uri)
            logger.warning("the tracking store %s has not received everything; `harness sync` sends the rest", store)
        return done

    def _work(self) -> None:
        reaped, closing, pause = False, False, 0.0
        while not closing:
            self._hurry.wait(pause)
            self._hurry.clear()
            closing = self._stop.is_set()
            try:
                reaped = self._cycle(reaped, closing)
            except Exception as error:  # the thread's outermost frame: training goes on, whatever the store does
                self._count_failure(error)
            else:
                self._failures = 0
            pause = min(CYCLE * 2**self._failures, LONGEST_PAUSE)

    def _cycle(self, reaped: bool, closing: bool) -> bool:
        """One delivery, if there is anything to deliver; whether stale runs have been reaped by now."""
        if not self.pending():
            return reaped
        try:
            with held(self.folder / "mirror.lock", seconds=5 if closing else 0):
                delivery = self._open()
                if not reaped and not self._is_run_elsewhere():
                    delivery.reap()
                if closing and self._ever_failed:
                    delivery.forget()  # a creation that timed out may have succeeded since
                delivery.deliver(live=not closing, unfinished=self._unfinished)
        except TimeoutError:
            if closing:
                raise
            return reaped  # `harness sync` is at it
        return True

    def _count_failure(self, error: Exception) -> None:
        self._failures += 1
        self._ever_failed = True
        if self._failures == 2:  # the first may be a hiccup, and one warning is enough
            logger.warning("the tracking store takes no data (%s); training goes on, the data is sent later", error)
        logger.debug("delivery failed", exc_info=error)

    def _open(self) -> Delivery:
        """The dealings with the store, which is opened at first use: this imports mlflow."""
        if self._delivery is None:
            check(self.uri)
            from harness.tracking.store import Store

            self._delivery = Delivery(Store(self.uri, self.folder.parent), self.folder, self._key)
        return self._delivery

    @contextmanager
    def _alone(self) -> Iterator[None]:
        try:
            with held(self.folder / "mirror.lock", PATIENCE):
                yield
        except TimeoutError as error:
            raise StoreError("another process is delivering this study; try again when it is done") from error

    def _is_live(self) -> bool:
        return (self._thread is not None and not self._stop.is_set()) or self._is_run_elsewhere()

    def _is_run_elsewhere(self) -> bool:
        """Whether another process holds the study's lock."""
        known = holder(self.folder / "lock")
        return known is not None and known.get("pid") != os.getpid()
