"""How much quality and time do smaller KV and E cost (the codecs int8 and int4)?

    python -m benchmarks.compression [--num-documents 24] [--json FILE]

Physics: a codec saves time if the link is slower than the codec. Let `r` be the ratio of bytes, and
`e` and `d` the seconds per byte to encode and decode. If the codec does not run during the
transfer, it saves time on links below (1 - r) / (e + d) bytes per second. The scale of each vector
takes two bytes: 64 values of bfloat16 shrink from 128 bytes to 66 (8 bits) or 34 (4 bits).

Quality, of the shipped pairs: the sender's KV and E are encoded and decoded. The receiver
recomputes the profile's block from this E, and answers the held-out questions. KL is the distance
to the receiver's full prefill, without a codec. The pairs' head_dim is 32, half of the usual size,
so their ratios are a little worse.
"""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks import result
from benchmarks.races import race
from cachetree.checkpoint import Codec, vector_bytes
from cachetree.checkpoint.codecs import decode, encode
from profiles.answerers import answerers
from profiles.compute.examination import Answerer, Examination
from profiles.compute.layered import KV
from profiles.compute.models import ModelSource, load_pair
from profiles.compute.study import mixtures_of
from profiles.data.documents import Document
from profiles.evidence import MeasuredProfile, read_measured
from profiles.stats.measured import FULL_REUSE, Candidate
from tools.pairs.questions import DATA, SHIPPED, read_documents

WEIGHTS = SHIPPED / "weights"
SUBJECTS = {
    "fine-tunes": (
        ModelSource(path=WEIGHTS / "sender"),
        ModelSource(path=WEIGHTS / "receiver"),
        SHIPPED / "sender_to_receiver.json",
    ),
    "adapters": (
        ModelSource(path=WEIGHTS / "foundation", adapter=WEIGHTS / "sender_lora"),
        ModelSource(path=WEIGHTS / "foundation", adapter=WEIGHTS / "receiver_lora"),
        SHIPPED / "sender_lora_to_receiver_lora.json",
    ),
}
SPEED_VECTORS, SPEED_LENGTH = 1 << 17, 128
REPEATS = 9


def through(codec: Codec, tensor: Tensor, length: int) -> Tensor:
    """Encode and decode a tensor, with its last dimension cut into vectors of `length`."""
    vectors = tensor.reshape(-1, length)
    return decode(codec, encode(codec, vectors), tensor.dtype).view(tensor.shape)


def measure_quality(name: str, num_documents: int) -> list[dict[str, Any]]:
    """Return F1 and KL under every codec: with all layers loaded, and with the profile's block."""
    sender_at, receiver_at, profile_at = SUBJECTS[name]
    profile = read_measured(profile_at)
    pair = load_pair(sender_at, receiver_at, dtype=torch.bfloat16)
    documents = read_documents(DATA / "held_out.jsonl", pair.tokenizer)[:num_documents]
    sender, receiver = answerers(pair, documents, 2.0)
    scores_of: dict[tuple[Codec, str], list[tuple[float, float]]] = {}
    for document in documents:
        for (codec, what), scores in examine(sender, receiver, profile, document).items():
            scores_of.setdefault((codec, what), []).extend(scores)
    head_dim = pair.receiver.config.head_dim
    return [
        {
            "pair": name,
            "codec": codec.value,
            "what": what,
            "ratio": vector_bytes(codec, head_dim, 2) / (2 * head_dim),
            "f1": round(fmean(quality for quality, _ in scores), 4),
            "kl": round(fmean(kl for _, kl in scores), 5),
        }
        for (codec, what), scores in scores_of.items()
    ]


def examine(
    sender: Answerer, receiver: Answerer, profile: MeasuredProfile, document: Document
) -> dict[tuple[Codec, str], list[tuple[float, float]]]:
    """Return F1 and KL of each question about one document, by codec and plan."""
    block, num_layers = profile.recommended.block, receiver.model.num_layers
    theirs = sender.model.prefix(document.prefix, {block.start})
    own = receiver.model.prefix(document.prefix, ()).kv
    examination = Examination(receiver, document, own, receiver.answer(document, own))
    head_dim = theirs.kv[0][0].shape[-1]
    plans = {"full reuse": FULL_REUSE, "block": Candidate(runs=(block,))}
    mixtures = mixtures_of([*plans.values()], num_layers)
    scores_of = {}
    for codec in Codec:
        kv: list[KV] = [
            (through(codec, keys, head_dim), through(codec, values, head_dim))
            for keys, values in theirs.kv
        ]
        e = through(codec, theirs.e[block.start], head_dim)
        new = receiver.model.recompute(e, block)
        scores = examination.examine([kv, own, new], mixtures, is_decoded=True)
        for what, of_mixture in zip(plans, scores, strict=True):
            scores_of[codec, what] = [(score.quality, score.kl) for score in of_mixture]
    return scores_of


def measure_speed() -> list[dict[str, Any]]:
    """Measure GB/s of bfloat16 on one thread: each codec's `encode` and `decode`, and a copy."""
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(SPEED_VECTORS, SPEED_LENGTH, generator=generator).to(torch.bfloat16)
    target = torch.empty_like(vectors)
    works = {("memcpy", "copy"): partial(target.copy_, vectors)}
    errors = {}
    for codec in (Codec.INT8, Codec.INT4):
        encoded = encode(codec, vectors)
        works[codec.value, "encode"] = partial(encode, codec, vectors)
        works[codec.value, "decode"] = partial(decode, codec, encoded, torch.bfloat16)
        off = decode(codec, encoded, torch.float32) - vectors.float()
        errors[codec.value] = float(off.norm() / vectors.float().norm())
    return [
        {
            "codec": codec,
            "what": what,
            "gb_per_s": of.medians()["gb_per_s"],
            "relative_error": round(errors.get(codec, 0.0), 4),
        }
        for (codec, what), of in race(works, vectors.nbytes, REPEATS).items()
    ]


def main() -> None:
    parser = result.arguments(__doc__)
    parser.add_argument("--num-documents", type=int, default=24)
    args = parser.parse_args()
    environment = result.here()
    torch.set_num_threads(1)
    quality = [row for name in SUBJECTS for row in measure_quality(name, args.num_documents)]
    results = {"quality": quality, "speed": measure_speed()}
    result.write("compression", results, environment, args.json)


if __name__ == "__main__":
    main()
