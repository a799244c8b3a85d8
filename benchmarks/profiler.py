"""How much sooner is every block of a pair measured together than each block on its own?

    python -m benchmarks.profiler [--num-documents 24] [--dtype float32] [--json FILE]

The shipped pair of 12 layers × 128 and its training contexts of 112 to 144 tokens, three questions
each; every block at group 1, full reuse, and each layer reused alone. The training sweep, unpruned,
against the paper's way (§4.2), where each of these is a configuration of its own. Both give for
every question the KL and top-1 agreement with full prefill, the negative log-likelihood of a given
answer, and the F1 of a decoded one. Numbers are compared before times.

Physics, for L layers:

                                  each block on its own     sweep
    prefix passes                 L(L+1)/2 + 2              L + 1
    layers over the prefix        L(L+1)(L+2)/6 + 2L        L(L+3)/2
    layers over a given answer    L²(L+1)/2                 L² + (L³-L)/6
    layers over a decoded answer  L²(L+1)/2 a token         none where the given answer stays

So the prefix alone makes the sweep about L/3 times faster, and the given answers up to 3 times; for
L = 12 it is 4.3 and 2.2. The prefix decides where contexts are long. These are short, so that the
questions take most of the time, and the sweep gains as much by what it can batch: all blocks of one
start read the same KV. L/4 is demanded.

The baseline is generous to the paper: the sender's and the receiver's own pass over a context are
made once, E is kept at every layer, a block's partial prefill serves all questions about its
context, one after the other, answers that are given twice are computed once, and decoding ends with
the answer. The second baseline is more generous still, with all questions about a context in one
batch. Only the sweep's time includes the sender's answers, and writing results to disk. Everything
computes with one thread; contenders take turns in who is first.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from benchmarks import result
from benchmarks.block_by_block import Found, OneByOne, Results, block_name
from benchmarks.random_servers import rotated
from profiles.compute.examination import Answerer
from profiles.compute.journal import Journal
from profiles.compute.measuring import measure, sweep_steps
from profiles.compute.models import load_pair
from profiles.compute.study import TRAIN, Bench
from profiles.data.documents import Document
from profiles.data.metrics import Metric
from profiles.data.tasks import TaskOptions
from profiles.profiler import answerers
from profiles.settings import Settings
from profiles.splits import load_documents
from profiles.stats.choice import grid
from profiles.stats.measured import Measured, Score

PAIR: Final = Path(__file__).resolve().parents[1] / "examples" / "pairs"
OPTIONS: Final = TaskOptions(template="<bos> {context} {input}", metric=Metric.F1, max_new=8)
SWEEP: Final = "sweep"
ALONE: Final = "each block on its own"
BATCHED: Final = "the same, questions batched"
TOLERANCES: Final[Mapping[str, float]] = {"float32": 1e-4, "bfloat16": 0.05}
"""Nats by which rounding may change a KL, a likelihood (relative where more than 1) or a margin."""
MOST_NEAR_TIES: Final = 0.001
"""Share of answers in which rounding may have chosen another token."""


class Contender(Protocol):
    name: str
    passes: int

    def measure(self, document: Document) -> Results: ...


@dataclass(slots=True)
class Together:
    """The training sweep; it does not know its margins."""

    sender: Answerer
    receiver: Answerer
    folder: Path
    name: str = SWEEP
    passes: int = 0
    _num_runs: Iterator[int] = field(default_factory=count)

    def measure(self, document: Document) -> Results:
        swept = self.sweep([document], pruned=False)
        scores = {
            "full reuse": swept.full_reuse[0],
            **{f"layer {i} reused": scores[0] for i, scores in enumerate(swept.layers)},
            **{block_name(block): scores[0] for block, scores in swept.blocks.items()},
        }
        return {name: [Found(it, 0.0) for it in found] for name, found in scores.items()}

    def sweep(self, documents: Sequence[Document], *, pruned: bool) -> Measured:
        journal = Journal(self.folder / f"{next(self._num_runs)}.jsonl")
        bench = Bench(sender=self.sender, receiver=self.receiver, journal=journal)
        blocks, num_layers = grid(bench.num_layers, 1), bench.num_layers
        steps = sweep_steps(documents, blocks, num_layers, pruned=pruned)
        swept = measure(bench, TRAIN, documents, steps)
        self.passes += journal.num_passes
        journal.close()
        return swept


@dataclass(slots=True)
class Comparison:
    """How far two measurements of the same configurations are apart."""

    tolerance: float
    num_answers: int = 0
    num_near_ties: int = 0
    """Answers in which another token was chosen, where two were equally likely up to rounding."""
    largest: float = 0.0
    """Distance of a KL or a likelihood."""
    problems: list[str] = field(default_factory=list)

    def compare(self, ours: Results, alone: Results) -> None:
        """Add one document's results; margins are those of `alone`."""
        if ours.keys() != alone.keys():
            self.problems.append(f"measured by one only: {sorted(ours.keys() ^ alone.keys())}")
            return
        for name in ours:
            for our, their in zip(ours[name], alone[name], strict=True):
                self._add(name, our.score, their.score, their.margin)

    def _add(self, name: str, ours: Score, theirs: Score, margin: float) -> None:
        self.num_answers += 1
        for field_name in ("kl", "own_nll"):
            a, b = getattr(ours, field_name), getattr(theirs, field_name)
            distance = abs(a - b) / max(1.0, abs(b))
            self.largest = max(self.largest, distance)
            if not distance <= self.tolerance:
                self.problems.append(f"{name}: {field_name} is {a:.6g} and {b:.6g}")
        if ours.quality == theirs.quality and abs(ours.agreement - theirs.agreement) < 1e-6:
            return
        self.num_near_ties += 1
        if not margin <= self.tolerance:
            self.problems.append(
                f"{name}: F1 is {ours.quality} and {theirs.quality}, agreement {ours.agreement:.3f}"
                f" and {theirs.agreement:.3f}, though all tokens are {margin:.2g} apart"
            )

    def verdict(self) -> list[str]:
        """What is wrong, a line each; nothing where the two agree."""
        allowed = MOST_NEAR_TIES * self.num_answers
        if self.num_near_ties <= allowed:
            return self.problems
        return [
            *self.problems,
            f"{self.num_near_ties} near-ties; at most {allowed:.1f} are allowed",
        ]


@dataclass(frozen=True, slots=True)
class Run:
    """One contender on one document."""

    wall_s: float
    cpu_s: float
    passes: int
    results: Results


def timed(contender: Contender, document: Document) -> Run:
    passes, wall_s, cpu_s = contender.passes, time.perf_counter(), time.process_time()
    results = contender.measure(document)
    return Run(
        time.perf_counter() - wall_s,
        time.process_time() - cpu_s,
        contender.passes - passes,
        results,
    )


def race(contenders: Sequence[Contender], documents: Sequence[Document]) -> dict[str, list[Run]]:
    """Every contender on every document; they take turns in who is first."""
    runs: dict[str, list[Run]] = {it.name: [] for it in contenders}
    for index, document in enumerate(documents):
        for contender in rotated(contenders, index):
            runs[contender.name].append(timed(contender, document))
    return runs


def total_s(runs: Sequence[Run]) -> float:
    return sum(run.wall_s for run in runs)


def summary_of(runs: Sequence[Run], ours: Sequence[Run]) -> dict[str, Any]:
    cpu_s, our_cpu_s = (sum(run.cpu_s for run in it) for it in (runs, ours))
    return {
        "wall_s": total_s(runs),
        "cpu_s": cpu_s,
        "passes_per_context": sorted({run.passes for run in runs}),
        "times_the_sweep": total_s(runs) / total_s(ours),
        "times_the_sweep_cpu": cpu_s / our_cpu_s,
    }


def problems_of(
    runs: Mapping[str, Sequence[Run]],
    comparisons: Mapping[str, Comparison],
    num_layers: int,
    times_demanded: float,
) -> list[str]:
    """Why the numbers of this race do not count; nothing where they do."""
    on_its_own = num_layers * (num_layers + 1) // 2 + 2
    expected = {name: num_layers + 1 if name == SWEEP else on_its_own for name in runs}
    found = [f"{name}: {it}" for name, of in comparisons.items() for it in of.verdict()]
    for name, passes in expected.items():
        made = sorted({run.passes for run in runs[name]})
        if made != [passes]:
            found.append(f"{name}: {made} prefix passes over a context, not {passes}")
    times = total_s(runs[ALONE]) / total_s(runs[SWEEP])
    if not times >= times_demanded:
        found.append(f"{ALONE} took {times:.2f} times as long; {times_demanded:.2f} is demanded")
    return found


def main() -> int:
    parser = result.arguments(__doc__)
    parser.add_argument("--num-documents", type=int, default=24)
    parser.add_argument("--dtype", default="float32", choices=TOLERANCES)
    parser.add_argument(
        "--times", type=float, help="times as long as the sweep each block on its own has to take"
    )
    args = parser.parse_args()
    environment = result.here()
    torch.set_num_threads(1)
    settings = Settings(
        sender=PAIR / "weights" / "sender",
        receiver=PAIR / "weights" / "receiver",
        data=(str(PAIR / "data" / "train.jsonl"),),
        **asdict(OPTIONS),
        out=Path(),
        dtype=args.dtype,
        device="cpu",
    )
    pair = load_pair(
        *settings.pair,
        dtype=getattr(torch, args.dtype),
        device=torch.device(settings.device),
    )
    positions = pair.receiver.config.max_position_embeddings
    _, documents = load_documents(settings, settings.data, pair.tokenizer, positions)
    documents = documents[: args.num_documents]
    sender, receiver = answerers(pair, documents, settings.max_memory_gb)
    num_questions = [len(it.questions) for it in documents]
    comparisons = {name: Comparison(TOLERANCES[args.dtype]) for name in (ALONE, BATCHED)}
    with tempfile.TemporaryDirectory() as folder:
        together = Together(sender, receiver, Path(folder))
        baselines = [
            OneByOne(name, pair.sender, receiver, num_batched)
            for name, num_batched in ((ALONE, 1), (BATCHED, max(num_questions)))
        ]
        one_question = replace(documents[0], questions=documents[0].questions[:1])
        race(baselines, [one_question])  # Warms up, and the sweep with its large batches:
        together.measure(documents[0])
        runs = race([together, *baselines], documents)
        began_s = time.perf_counter()
        together.sweep(documents, pruned=True)
        pruned_s = time.perf_counter() - began_s
    for baseline in baselines:
        for our, alone in zip(runs[SWEEP], runs[baseline.name], strict=True):
            comparisons[baseline.name].compare(our.results, alone.results)
    summaries = {name: summary_of(it, runs[SWEEP]) for name, it in runs.items()}
    demanded = pair.num_layers / 4 if args.times is None else args.times
    problems = problems_of(runs, comparisons, pair.num_layers, demanded)
    for problem in problems:
        sys.stderr.write(f"{problem}\n")
    summary = {
        "num_layers": pair.num_layers,
        "num_contexts": len(documents),
        "num_questions": sum(num_questions),
        "dtype": args.dtype,
        "num_threads": torch.get_num_threads(),
        "contenders": summaries,
        "pruned_sweep_s": pruned_s,
        "comparisons": {name: asdict(it) for name, it in comparisons.items()},
        "times_demanded": demanded,
        "problems": problems,
    }
    result.write("profiler", summary, environment, args.json)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
