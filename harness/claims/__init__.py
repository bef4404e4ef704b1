"""The articles' claims, each judged by what the records hold: `harness claims`.

`catalogue` has the claims with the evidence that settles them, as data; `rules` says what a piece of evidence is and
when a claim is *supported*, *refuted*, *depends* or is *undecided*; `evidence` reads records, `laws` runs tests,
`judge` puts them together and corrects for their number, `page` writes them down.
"""

from harness.claims import laws
from harness.claims.catalogue import CLAIMS, GROUPS
from harness.claims.evidence import Records
from harness.claims.judge import Judged, effect, judge, laws_of, missing_studies
from harness.claims.page import block, lines, row, summary
from harness.claims.publish import publish

__all__ = [
    "CLAIMS",
    "GROUPS",
    "Judged",
    "Records",
    "block",
    "effect",
    "judge",
    "laws",
    "laws_of",
    "lines",
    "missing_studies",
    "publish",
    "row",
    "summary",
]
