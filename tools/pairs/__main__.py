"""Train the small pairs from their seeds and export them.

    python -m tools.pairs [--work build/pairs] [--out build/pairs/weights]
    python -m tools.pairs --add-to examples/pairs/weights

With `--add-to` only what that folder lacks is trained, on the
foundation that lies there. A run that was stopped continues where it was; finished stages are
loaded. The result is a statistical reproduction of `examples/pairs/weights`, not a bitwise one,
because float sums differ between processors. `examples/pairs/README.md` says how to judge it.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

from tqdm import tqdm

from tools.pairs.model import read_model, write_model
from tools.pairs.stages import FOUNDATION, STAGES
from tools.pairs.train import RecipeError, Trained, run_recipe


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.pairs", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--work", type=Path, default=Path("build/pairs"), help="checkpoints")
    parser.add_argument("--out", type=Path, default=Path("build/pairs/weights"), help="result")
    parser.add_argument("--add-to", type=Path, help="folder with a foundation to make more of")
    args = parser.parse_args()
    stages, given, out = STAGES, {}, args.out
    if args.add_to is not None:
        out = args.add_to
        digest = hashlib.sha256((out / FOUNDATION / "model.safetensors").read_bytes())
        model = read_model(out / FOUNDATION)
        given = {FOUNDATION: Trained(model=model, fingerprint=digest.hexdigest()[:16])}
        lacking = (it for it in STAGES if not (out / it.name).exists())
        stages = tuple(it for it in lacking if it.parent == FOUNDATION)
    num_steps = sum(stage.num_steps for stage in stages)
    tqdm.write(f"{len(stages)} stages, {num_steps} steps, checkpoints in {args.work}")
    try:
        trained = run_recipe(stages, args.work, given)
    except RecipeError as error:
        tqdm.write(f"stopped: {error}")
        return 1
    except KeyboardInterrupt:
        tqdm.write("stopped; the same command continues")
        return 130
    for stage in stages:
        if FOUNDATION in (stage.name, stage.parent):
            write_model(trained[stage.name].model, out / stage.name)
    tqdm.write(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
