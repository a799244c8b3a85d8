"""Three ways to serve one skill on long documents that the base has read, in one server.

    make real
    python -m benchmarks.three_ways --json benchmarks/results/three_ways.json

The skill `questions` as an ordinary adapter and as an activated one, on the documents of the set
`long`, about 2,000 tokens each. The base reads a document first. Then each question is answered by

    full prefill    the ordinary adapter alone: what SGLang does
    all loaded      the ordinary adapter on the base's KV: the limit of time
    block           the same, with its profile's block recomputed
    activated       the activated adapter on the base's KV, which is what it would compute

Ways take turns, so that none always comes first. Answers of the activated adapter are compared with
its answers by full prefill before times are: both have to be the same tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final
from uuid import uuid4

from benchmarks import result
from cachetree.planning import read_profile
from profiles.compute.models import ModelSource, load_tokenizer
from profiles.data.datasets import load_sources
from profiles.data.documents import Document, make_documents
from profiles.data.tasks import score
from profiles.environment import ROOT
from profiles.stats.gate import interval
from sglang_droidspeak.fleet.servers import Server, ServerSpec, running
from tools.real.check import MAX_NEW, options
from tools.real.sharing import SKILL, write_lessons

BASE: Final = ROOT / "build/real/base"
SHIPPED: Final = ROOT / "examples/real"
ADAPTERS: Final = {it: SHIPPED / it for it in (SKILL, f"{SKILL}_alora")}
PROFILE: Final = SHIPPED / f"base_to_{SKILL}_lora.json"
PUBLISH: Final = {"publish": "before_reply"}
TARGETS: Final = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
OFF: Final = {"mode": "off"}
PAGE: Final = 16


def ways() -> dict[str, tuple[str, Mapping[str, str]]]:
    """Each with the adapter that answers, and what its requests ask for."""
    profile = read_profile(PROFILE)
    plan, sender = profile.recommended, {"sender": profile.sender.model_id}
    assert plan is not None
    ordinary, activated = ADAPTERS
    return {
        "full prefill": (ordinary, OFF),
        "all loaded": (ordinary, {**sender, "block": "none"}),
        f"block [{plan.start}, {plan.stop})": (
            ordinary,
            {**sender, "block": f"{plan.start}:{plan.stop}"},
        ),
        "activated": (activated, {}),
    }


def documents(num: int, num_questions: int) -> list[Document]:
    with tempfile.TemporaryDirectory() as folder:
        _, file = write_lessons(SHIPPED / "packages.jsonl", Path(folder))
        sources = load_sources([str(file)], options(SKILL))
    tokenizer = load_tokenizer(ModelSource(path=BASE))
    made = make_documents(sources, tokenizer, page_size=PAGE, max_prompt_tokens=None)
    return [replace(it, questions=it.questions[:num_questions]) for it in made[:num]]


def answers(server: Server, asked: Sequence[Document]) -> Iterator[tuple[str, int, dict[str, Any]]]:
    """By way and document: the first token's time, quality and label of each answer."""
    tokenizer = load_tokenizer(ModelSource(path=BASE))
    turn = 0
    for number, document in enumerate(asked):
        salt = uuid4().hex
        read = {"droidspeak": PUBLISH, "cache_salt": salt, "timeout_s": 600}
        server.generate(document.prefix, max_new_tokens=1, **read)
        for question in document.questions:
            order = list(ways().items())
            turn = (turn + 1) % len(order)
            for way, (adapter, controls) in [*order[turn:], *order[:turn]]:
                server.flush()
                ttft_s, reply = server.stream(
                    [*document.prefix, *question.suffix],
                    max_new_tokens=MAX_NEW[SKILL],
                    lora_path=adapter,
                    droidspeak=controls,
                    cache_salt=uuid4().hex if controls is OFF else salt,
                    timeout_s=600,
                )
                if way == "activated":
                    check_exact(server, document, question.suffix, adapter, reply["output_ids"])
                text = tokenizer.decode(reply["output_ids"], skip_special_tokens=True)
                (label,) = reply["meta_info"]["droidspeak"]
                quality = score(document.task, text, question.answers)
                yield way, number, {"ttft_s": ttft_s, "quality": quality, "label": label}


def check_exact(
    server: Server, document: Document, suffix: Sequence[int], adapter: str, ids: Sequence[int]
) -> None:
    """Raise AssertionError if the adapter answers something else by full prefill.

    Only about the first question of a document: a full prefill takes seconds.
    """
    if suffix is not document.questions[0].suffix:
        return
    reply = server.generate(
        [*document.prefix, *suffix],
        max_new_tokens=MAX_NEW[SKILL],
        lora_path=adapter,
        droidspeak=OFF,
        cache_salt=uuid4().hex,
        timeout_s=600,
    )
    assert reply["output_ids"] == list(ids), "the activated adapter's answer changed by reuse"


def rows_of(found: Sequence[tuple[str, int, dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    names = list(dict.fromkeys(way for way, _, _ in found))
    full_s = median(it["ttft_s"] for way, _, it in found if way == names[0])
    for name in sorted(names, key=[*ways()].index):
        mine = [(number, it) for way, number, it in found if way == name]
        by_document: dict[int, list[float]] = {}
        for number, it in mine:
            by_document.setdefault(number, []).append(it["quality"])
        quality = interval([*by_document.values()])
        ttft_s = median(it["ttft_s"] for _, it in mine)
        yield {
            "way": name,
            "questions": len(mine),
            "quality": quality.mean,
            "low": quality.low,
            "high": quality.high,
            "ttft_s": ttft_s,
            "speedup": full_s / ttft_s,
            "layers": median(it["label"]["recomputed_layers"] for _, it in mine),
            "outcomes": dict.fromkeys(sorted({it["label"]["outcome"] for _, it in mine}), 1),
        }


def main() -> None:
    parser = result.arguments(__doc__)
    parser.add_argument("--documents", type=int, default=20, metavar="N")
    parser.add_argument("--questions", type=int, default=1, metavar="N", help="about each")
    args = parser.parse_args()
    environment = result.here()
    asked = documents(args.documents, args.questions)
    spec = ServerSpec(
        model=BASE,
        adapters=ADAPTERS,
        options={
            "device": "cpu",
            "dtype": "float32",
            "max-total-tokens": 16384,
            "max-running-requests": 4,
            "chunked-prefill-size": 4096,
            "max-loras-per-batch": 3,
            "lora-target-modules": TARGETS,
        },
        droidspeak={"profiles": [str(PROFILE)], "gate": "none", "host_gb": 4},
    )
    with running(spec, env={"OMP_NUM_THREADS": "2"}) as (server,):
        found = list(answers(server, asked))
    tokens = median(len(it.prefix) for it in asked)
    told = {"rows": list(rows_of(found)), "documents": len(asked), "tokens": tokens}
    result.write("three_ways", told, environment, args.json)


if __name__ == "__main__":
    main()
