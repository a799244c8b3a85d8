"""Where the benchmarks' modules lie."""

import sys
from pathlib import Path

# Last, so that no module of theirs stands for another.
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
