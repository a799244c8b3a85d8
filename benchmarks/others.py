"""How do evaluation packages of other projects rate answers from another model's KV?

    pip install --no-deps --target build/others -r benchmarks/others.txt
    python -m benchmarks.others --packages build/others [--model build/real/base] [--num 4]

Prompts and scores are those of the packages. Two servers have a real base of 135M parameters and
three adapters. One is SGLang alone and prefills every prompt in full. The other has the extension.
There the base has read the document first, and the adapter answers from the base's KV:

    questions                     recomputes its profile's block, [6, 24), with corrected E
    questions_alora, json_alora   recompute nothing: activated adapters share exactly

SGLang alone cannot serve an activated adapter. So the full prefill of such an adapter runs on the
other server, with `mode: off`.

The two servers take turns, except for the package REFRACT. Each request has a salt of its own, and
so reads no cache of another prompt. It names its block, because the server would not choose a plan
that saves no time. The adapters have learned to read records of Debian packages, and answer few of
these prompts well. So read first how many answers of the two servers are equal.

Physics: on the document, the plan saves 12 of 30 layers, and an activated adapter saves all.
Prompts are shorter than the profile's 400 tokens, so other costs take a part of this saving.
"""

from __future__ import annotations

import json
import random
import statistics
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import result
from benchmarks.random_servers import ENV, PAGE, options
from profiles.data import metrics
from profiles.data.documents import common_start
from sglang_droidspeak.fleet.servers import Server, ServerSpec, running

ROOT = Path(__file__).resolve().parents[1]
ALONE, EXTENDED = "SGLang", "extension"
MAX_NEW = 16
NUM_TOKENS = 330
"""Approximate tokens of a document. With question and template, a prompt must have below 400."""
CONTROLS = {"questions": {"block": "6:24"}, "questions_alora": {}, "json_alora": {}}
"""Adapters, each with what requests to it ask for in `custom_params["droidspeak"]`. The aLoRAs name
no block: they recompute nothing."""
Score = Callable[[Sequence[str], Sequence[Sequence[str]]], float]


@dataclass(frozen=True)
class Case:
    """A document and a question about it."""

    document: str
    question: str
    answers: Sequence[str] = ()
    read: str | None = None
    """Document that the base has read, if it is not the document of the question."""


@dataclass(frozen=True)
class Sample:
    ids: tuple[int, ...]
    text: str
    ttft_ms: float
    reused: float
    """Share of the prompt's tokens that were reused."""


@dataclass
class Bench:
    servers: dict[str, Server]
    tokenizer: Any
    pairs: list[tuple[str, str]] = field(default_factory=list)
    """Pairs of an answer and the expected answer, to compare scorers on."""
    samples: dict[str, list[Sample]] = field(default_factory=lambda: {ALONE: [], EXTENDED: []})

    def prompt(self, document: str, question: str) -> list[int]:
        message = {"role": "user", "content": f"{document}\n\n{question}"}
        text = self.tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True
        )
        return self.tokenizer.encode(text, add_special_tokens=False)

    def ask(self, who: str, model: str, case: Case, max_new: int = MAX_NEW) -> Sample:
        salt, ids = uuid.uuid4().hex, self.prompt(case.document, case.question)
        server, beside = self.servers[who], {}
        if who == EXTENDED:
            read = case.read or case.document
            other, another = (self.prompt(read, it) for it in (case.question, f"#{case.question}"))
            shared = len(common_start([other, another])) // PAGE * PAGE
            server.generate(other[:shared], max_new_tokens=1, cache_salt=salt)
            beside = {"droidspeak": CONTROLS[model]}
        elif not CONTROLS[model]:
            server, beside = self.servers[EXTENDED], {"droidspeak": {"mode": "off"}}
        ttft_s, reply = server.stream(
            ids, max_new_tokens=max_new, cache_salt=salt, lora_path=model, timeout_s=900, **beside
        )
        (label,) = reply["meta_info"].get("droidspeak", [{}])
        reused = label.get("reused_tokens", 0) / len(ids)
        sample = Sample(tuple(reply["output_ids"]), reply["text"], 1000 * ttft_s, reused)
        self.samples[who].append(sample)
        return sample

    def row(self, instrument: str, task: str, model: str, scores: Sequence[float]) -> dict:
        """Return a row that summarises all answers since the last row."""
        alone, extended = self.samples.values()
        same = [a.ids == b.ids for a, b in zip(alone, extended, strict=True)]
        row = {"instrument": instrument, "task": task, "receiver": model, "prompts": len(same)}
        row |= {"alone": scores[0], "extension": scores[1], "same": statistics.fmean(same)}
        row["reused"] = statistics.fmean(it.reused for it in extended)
        row["alone_ttft_ms"] = statistics.median(it.ttft_ms for it in alone)
        row["extension_ttft_ms"] = statistics.median(it.ttft_ms for it in extended)
        self.samples = {ALONE: [], EXTENDED: []}
        print(json.dumps(row), file=sys.stderr, flush=True)
        return row

    def judge(
        self, instrument: str, task: str, model: str, cases: Sequence[Case], score: Score
    ) -> dict:
        texts: dict[str, list[str]] = {ALONE: [], EXTENDED: []}
        for number, case in enumerate(cases):
            for who in (ALONE, EXTENDED)[:: 1 - 2 * (number % 2)]:
                texts[who].append(self.ask(who, model, case).text)
        answers = [it.answers for it in cases]
        self.pairs += [(it, some[0]) for it, some in zip(texts[ALONE], answers, strict=True)]
        scores = [score(texts[it], answers) for it in (ALONE, EXTENDED)]
        return self.row(instrument, task, model, scores)


def named(texts: Sequence[str], answers: Sequence[Sequence[str]]) -> float:
    """Compute the share of texts that contain one of their accepted answers."""
    both = zip(texts, answers, strict=True)
    return statistics.fmean(any(it.lower() in text.lower() for it in some) for text, some in both)


def refract(bench: Bench, model: str, num: int) -> Iterator[dict]:
    """Score by the three axes of REFRACT that compare answers. Each prompt follows a document. The
    fourth axis needs log-probabilities of prompts, for which SGLang prefills in full."""
    from hard_needle.distractors import BuiltinDistractorPool
    from refract import runner
    from refract.axes import plad, rniah, trajectory
    from refract.backends.base import CompletionResult, TrajectoryResult

    text = " ".join(BuiltinDistractorPool().sample(99, random.Random(1)))

    class Backend:
        def run_completion(self, *, prompt, kv_config_str, n_predict, system=None, **_):
            who = EXTENDED if "q8_0" in kv_config_str else ALONE
            sample = bench.ask(who, model, Case(system or text[: 4 * NUM_TOKENS], prompt))
            return CompletionResult(text=sample.text, n_tokens=len(sample.ids))

        def run_completion_trajectory(self, **asked):
            self.run_completion(**asked)
            who = EXTENDED if "q8_0" in asked["kv_config_str"] else ALONE
            return TrajectoryResult(token_ids=[*bench.samples[who][-1].ids])

        def tokenize_to_ids(self, *, text, **_):
            return bench.tokenizer.encode(text, add_special_tokens=False)

    runner.set_active_backend(Backend())
    shared: dict[str, Any] = {"reference_kv": runner.KVConfig(), "progress": False}
    shared |= {"candidate_kv": runner.KVConfig(ctk="q8_0", ctv="q8_0"), "n_predict": MAX_NEW}
    lines = (Path(runner.__file__).parent / "prompts/v0.1.jsonl").read_text().splitlines()
    length, depths = NUM_TOKENS + 2 * MAX_NEW, tuple((it + 0.5) / num for it in range(num))
    sizes: dict[str, Any] = {"ctx_max": length, "lengths": (length,), "positions": depths}
    with tempfile.TemporaryDirectory() as folder:
        prompts, corpus = Path(folder) / "prompts.jsonl", Path(folder) / "corpus.txt"
        prompts.write_text("\n".join(lines[:: len(lines) // num][:num]))
        corpus.write_text(text)
        axes = {
            "trajectory": partial(trajectory.run_trajectory, prompts_path=prompts),
            "needles": partial(rniah.run_rniah, haystack_corpus=corpus, **sizes),
            "typos": partial(plad.run_plad, prompts_path=prompts, perturbations=("typo",)),
        }
        for task, axis in axes.items():
            score = axis(model=Path(), **shared).score
            yield bench.row("refract-llm", task, model, (100, score))


def needles(bench: Bench, model: str, num: int) -> Iterator[dict]:
    """Ask for one of several similar facts in a document. Then ask again, after the base has read a
    document in which this fact has another value."""
    from hard_needle.corruption import corrupt_example
    from hard_needle.generator import generate_hard_example

    made = [generate_hard_example(4, 4 * NUM_TOKENS, seed=it) for it in range(2 * num)]
    twins = [corrupt_example(it, corruption_type="swap_value", seed=7) for it in made[:num]]
    for task, examples in (("needles", made), ("twin, another document read", twins)):
        cases = []
        for example, read in zip(examples, made, strict=False):
            document, _, question = example["prompt"].partition("\n\nQuestion: ")
            other = read["prompt"].partition("\n\nQuestion: ")[0]
            cases.append(Case(document, question[: -len("\nAnswer:")], [example["target"]], other))
        yield bench.judge("hard-needle", task, model, cases, named)


def ruler(bench: Bench, model: str, num: int) -> Iterator[dict]:
    """Run RULER's tasks that need no download, with lm-eval's generators and scorer."""
    from lm_eval.tasks.ruler import common_utils, cwe_utils, fwe_utils, vt_utils

    def score(texts: Sequence[str], answers: Sequence[Sequence[str]]) -> float:
        return common_utils.string_match_all(common_utils.postprocess_pred([*texts]), [*answers])

    random.seed(5)
    words = {"vocab_size": 40, "incremental": 8}
    makers = {
        "vt": lambda: vt_utils.generate_input_output(9, 1, 4),
        "cwe": lambda: cwe_utils.generate_input_output(9, 512)[1:],
        "fwe": lambda: fwe_utils.generate_input_output(NUM_TOKENS, bench.tokenizer, **words),
    }
    for task, make in makers.items():
        cases = []
        for text, answers, *_ in (make() for _ in range(num)):
            document, _, question = text.partition("\nQuestion: ")
            cases.append(Case(document.strip(), question.partition(" Answer: ")[0], answers))
        yield bench.judge("lm-eval", f"RULER {task}", model, cases, score)


def tools(bench: Bench, model: str, num: int) -> Iterator[dict]:
    """Ask two questions about each list of tools. A right answer names the right function."""
    import bfcl_eval

    folder = Path(bfcl_eval.__file__).parent / "data"
    name = "BFCL_v4_live_multiple.json"
    lines = (folder / "possible_answer" / name).read_text().splitlines()
    right = {it["id"]: [*it["ground_truth"][0]] for it in map(json.loads, lines)}
    by_list: dict[str, list[Case]] = {}
    for asked in map(json.loads, (folder / name).read_text().splitlines()):
        listed = "Tools:\n" + json.dumps(asked["function"])
        case = Case(listed, asked["question"][0][-1]["content"], right[asked["id"]])
        by_list.setdefault(listed, []).append(case)
    lengths = {it: len(bench.tokenizer.encode(it)) for it in by_list}
    some = [it for it in by_list if len(by_list[it]) > 1 and 200 < lengths[it] <= NUM_TOKENS]
    cases = [case for it in some[:num] for case in by_list[it][:2]]
    yield bench.judge("bfcl-eval", "tool lists", model, cases, named)


def load(server: Server, model: Path) -> dict:
    """Run SGLang's own load benchmark. The base reads four documents. Then requests about them name
    adapters, drawn from a Zipf distribution."""
    command = f"""-m sglang.bench_serving --backend sglang --base-url {server.url} --model {model}
        --dataset-name generated-shared-prefix --gsp-num-groups 4 --gsp-prompts-per-group 5
        --gsp-system-prompt-len 256 --gsp-question-len 32 --gsp-output-len 4 --seed 3
        --max-concurrency 4 --warmup-requests 0"""
    zipf = "--lora-request-distribution skewed --lora-name questions_alora json_alora questions"
    with tempfile.NamedTemporaryFile("r") as out:
        command += f" --output-file {out.name}"
        for words in (command, f"{command} {zipf}"):
            subprocess.run([sys.executable, *words.split()], check=True, stdout=subprocess.DEVNULL)
        measured = json.loads(out.readlines()[-1])
    names = ("completed", "median_ttft_ms", "p99_ttft_ms", "total_throughput")
    return {"server": server.name} | {it: measured[it] for it in names}


def scorers(pairs: Sequence[tuple[str, str]]) -> dict:
    """Compare LongBench's scorers, as lm-eval has them, with ours on the same answers."""
    from lm_eval.tasks.longbench import metrics as theirs

    both = [(theirs.qa_f1_score, metrics.f1), (theirs.rouge_score, metrics.rouge_l)]
    both += [(theirs.count_score, metrics.count)]
    far = [abs(a(*it) - b(*it)) for it in pairs for a, b in both]
    return {"scores": len(far), "largest_difference": max(far)}


def main() -> None:
    parser = result.arguments(__doc__)
    parser.add_argument("--packages", type=Path, required=True, help="folder of others.txt")
    parser.add_argument("--model", type=Path, default=ROOT / "build/real/base")
    parser.add_argument("--num", type=int, default=4, help="prompts of each task")
    args = parser.parse_args()
    sys.path.append(str(args.packages.absolute()))  # Last, so that it replaces nothing.
    from transformers import AutoTokenizer

    environment, model, rows = result.here(), args.model.absolute(), []
    common: dict[str, Any] = {
        "model": model,
        "options": options(max_total_tokens=16384, max_running_requests=4, max_loras_per_batch=4),
        "adapters": {it: ROOT / "examples/real" / it for it in CONTROLS},
    }
    settings = {"host_gb": 0.5, "profiles": [f"{ROOT}/examples/real/base_to_questions_lora.json"]}
    alone = ServerSpec(name=ALONE, **common)
    extended = ServerSpec(name=EXTENDED, droidspeak=settings, **common)
    with running(alone, extended, env=ENV, start_timeout_s=900) as servers:
        bench = Bench({it.name: it for it in servers}, AutoTokenizer.from_pretrained(model))
        loads = [load(it, model) for it in servers]
        for instrument in (refract, needles, ruler, tools):
            rows += instrument(bench, "questions", args.num)
        for receiver in ("questions_alora", "json_alora"):
            rows += tools(bench, receiver, args.num)
        rows += needles(bench, "questions_alora", args.num)
    results = {"rows": rows, "loads": loads, "scorers": [scorers(bench.pairs)]}
    result.write("others", results, environment, args.json)


if __name__ == "__main__":
    main()
