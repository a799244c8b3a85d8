"""What was measured becomes a verdict. Pure: no models, no devices, no clocks.

measured   the values that a run hands over
frontier   which plans are worth their work
choice     which of them are decoded, and tried by the gate
gate       may the pair be reused? judged on data that chose nothing
artifact   all of it as a profile
"""

from profiles.stats.artifact import (
    Data,
    Findings,
    SmallModel,
    Subject,
    build,
    losses_of,
    split_of,
    tv_bound,
)
from profiles.stats.choice import (
    MOST_TRIED,
    choose,
    closest,
    qualities_of,
    sensitive_first,
    shortlist,
)
from profiles.stats.frontier import default_group, grid
from profiles.stats.gate import ERROR_RATE, finding, interval, verdict
from profiles.stats.measured import Candidate, Judged, Score, Scores, Swept, spread

__all__ = [
    "ERROR_RATE",
    "MOST_TRIED",
    "Candidate",
    "Data",
    "Findings",
    "Judged",
    "Score",
    "Scores",
    "SmallModel",
    "Subject",
    "Swept",
    "build",
    "choose",
    "closest",
    "default_group",
    "finding",
    "grid",
    "interval",
    "losses_of",
    "qualities_of",
    "sensitive_first",
    "shortlist",
    "split_of",
    "spread",
    "tv_bound",
    "verdict",
]
