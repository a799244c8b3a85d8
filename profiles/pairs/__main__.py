"""Train the small pairs from their seeds and export them.

    python -m profiles.pairs [--work build/pairs] [--out build/pairs/weights]

25 to 45 minutes on one core. A run that was stopped continues where it was; finished stages are
loaded. The result is a statistical reproduction of `profiles/pairs/weights`, not a bitwise one,
because float sums differ between processors. `profiles/pairs/README.md` says how to judge it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tqdm import tqdm

from profiles.pairs.export import export_all
from profiles.pairs.stages import STAGES
from profiles.pairs.train import RecipeError, run_recipe


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m profiles.pairs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--work", type=Path, default=Path("build/pairs"), help="checkpoints")
    parser.add_argument("--out", type=Path, default=Path("build/pairs/weights"), help="result")
    args = parser.parse_args()
    num_steps = sum(stage.num_steps for stage in STAGES)
    tqdm.write(f"{len(STAGES)} stages, {num_steps} steps, checkpoints in {args.work}")
    try:
        trained = run_recipe(STAGES, args.work)
    except RecipeError as error:
        tqdm.write(f"stopped: {error}")
        return 1
    except KeyboardInterrupt:
        tqdm.write("stopped; the same command continues")
        return 130
    export_all(trained, args.out)
    tqdm.write(f"wrote {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
