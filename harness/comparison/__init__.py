"""What differs between runs, or between studies: data in, data out, from the files of runs and studies alone.

`find` turns names into folders, `of_runs` and `of_studies` make a document of what they hold (that of `--json`), and
`tables` puts a document into words. Runs and studies are called A, B, … in the order in which they were named.
"""

from harness.comparison.names import find
from harness.comparison.runs import Run, of_runs, read_run
from harness.comparison.studies import Study, of_studies
from harness.comparison.tables import Table, tables

__all__ = ["Run", "Study", "Table", "find", "of_runs", "of_studies", "read_run", "tables"]
