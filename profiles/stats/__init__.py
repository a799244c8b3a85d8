"""What was measured becomes a verdict. Pure: no models, no devices, no clocks.

measured   the values that a run hands over
frontier   which plans are worth their work
gate       may the pair be reused? judged on data that chose nothing
artifact   all of it as a profile
"""

from profiles.stats.artifact import (
    Data,
    SmallModel,
    Subject,
    build,
    choose,
    losses_of,
    qualities_of,
    split_of,
)
from profiles.stats.frontier import Standing, grid, survivors
from profiles.stats.gate import ERROR_RATE, finding, interval, verdict
from profiles.stats.measured import Candidate, Judged, Score, Scores, Swept, spread

__all__ = [
    "ERROR_RATE",
    "Candidate",
    "Data",
    "Judged",
    "Score",
    "Scores",
    "SmallModel",
    "Standing",
    "Subject",
    "Swept",
    "build",
    "choose",
    "finding",
    "grid",
    "interval",
    "losses_of",
    "qualities_of",
    "split_of",
    "spread",
    "survivors",
    "verdict",
]
