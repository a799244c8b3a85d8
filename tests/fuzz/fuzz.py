"""Run every target of `fuzz_targets` for many executions, and continue after a stop.

    python tests/fuzz/fuzz.py                     10^7 executions, shared out among the targets
    python tests/fuzz/fuzz.py --runs 100000       fewer
    python tests/fuzz/fuzz.py --targets record    these only

If atheris is installed (`pip install -e '.[fuzz]'`), it guides the inputs by coverage. Otherwise
they are seeded mutations. Each target runs in its own processes, a round of executions at a time.
`out/fuzz/TARGET/done.json` has its progress. An input that breaks a target stays in that folder as
`crash-*`; `fuzz_corpus.py add TARGET FILE` keeps it for the tests.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(HERE.parent / "cachetree")]

NUM_RUNS = 10_000_000
ROUND_RUNS = 500_000
MAX_BYTES = 8192
RSS_MB = 1024
TIMEOUT_S = 10
FAILED = 77


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--runs", type=int, default=NUM_RUNS)
    parser.add_argument("--targets", nargs="+", default=[])
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "fuzz")
    parser.add_argument("--round", nargs=2, metavar=("TARGET", "RUNS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.round:
        run_round(args.round[0], int(args.round[1]), args.out / args.round[0])
    else:
        run_all(args.targets, args.runs, args.out)


def run_all(names: list[str], num_runs: int, out: Path) -> None:
    from fuzz_targets import TARGETS

    names = names or list(TARGETS)
    total_share = sum(TARGETS[name].share for name in names)
    begun_at_s = time.monotonic()
    totals = dict.fromkeys(names, 0)
    broken = []
    for name in names:
        goal = round(num_runs * TARGETS[name].share / total_share)
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        note = folder / "done.json"
        done = json.loads(note.read_text())["num_runs"] if note.exists() else 0
        while done < goal and name not in broken:
            runs = min(ROUND_RUNS, goal - done)
            round_at_s = time.monotonic()
            command = [sys.executable, __file__, "--out", str(out), "--round", name, str(runs)]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                broken.append(name)
                print(f"{name}: FAILED, see {folder}\n{result.stdout}{result.stderr[-3000:]}")
                break
            done += runs
            totals[name] += runs
            note.write_text(json.dumps({"num_runs": done}))
            rate = runs / (time.monotonic() - round_at_s)
            print(f"{name}: {done} of {goal}, {rate:.0f} executions/s", flush=True)
    seconds = time.monotonic() - begun_at_s
    num_new = sum(totals.values())
    summary = {
        "question": "fuzz",
        "runs": num_new,
        "seconds": round(seconds, 1),
        "executions_per_s": round(num_new / seconds),
        "engine": "atheris" if find_spec("atheris") else "mutations",
        "broken": broken,
    }
    print(json.dumps(summary))
    sys.exit(bool(broken))


def run_round(name: str, num_runs: int, folder: Path) -> None:
    """Run a round in a new process with bounded memory. Does not return if atheris runs."""
    if find_spec("atheris"):
        _run_guided(name, num_runs, folder)
    else:
        _run_mutations(name, num_runs, folder)


def _run_guided(name: str, num_runs: int, folder: Path) -> None:
    import atheris

    with atheris.instrument_imports(include=["cachetree", "sglang_droidspeak"]):
        from fuzz_corpus import read_corpus
        from fuzz_targets import TARGETS
    grown = folder / "corpus"
    grown.mkdir(exist_ok=True)
    for number, data in enumerate(read_corpus().of(name)):
        (grown / f"sound-{number}").write_bytes(data)
    options = [
        f"-runs={num_runs}",
        f"-max_len={MAX_BYTES}",
        f"-rss_limit_mb={RSS_MB}",
        f"-timeout={TIMEOUT_S}",
        f"-artifact_prefix={folder}/",
        "-print_final_stats=1",
        "-verbosity=0",
    ]
    atheris.Setup([sys.argv[0], *options, str(grown)], TARGETS[name])
    atheris.Fuzz()


def _run_mutations(name: str, num_runs: int, folder: Path) -> None:
    from fuzz_corpus import read_corpus
    from fuzz_mutations import mutations
    from fuzz_targets import TARGETS

    target = TARGETS[name]
    resource.setrlimit(resource.RLIMIT_DATA, (RSS_MB << 20, resource.RLIM_INFINITY))
    seed = time.time_ns()
    print(f"seed {seed}")
    for data in itertools.islice(mutations(read_corpus().of(name), seed), num_runs):
        try:
            target(data)
        except BaseException:
            (folder / f"crash-{os.getpid()}").write_bytes(data)
            raise


if __name__ == "__main__":
    main()
