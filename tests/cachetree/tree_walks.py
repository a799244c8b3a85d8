"""Random operations on the tree and its oracle, as many as you like.

python tests/cachetree/tree_walks.py [--operations 1000000] [--seed N]

Ends in one JSON line, or at the first difference; the last seed that was printed shows it again.
"""

from __future__ import annotations

import argparse
import json
import random
import time

import msgspec
from page_oracle import Key, prefixes
from tree_oracle import ALPHABETS, LIAR, LOCATIONS, NAMES, PARTS, Mirror, path
from tree_parts import FAMILY, PAGE

from cachetree.ids import KV
from cachetree.tree.eviction import Retention

SHALLOW, DEEP = 7, 30
"""Lengths of the longest texts."""
FAMILIES = (FAMILY, msgspec.structs.replace(FAMILY, tokenizer="another"))


def some_text(rng: random.Random, longest: int, earlier: str) -> str:
    """Draw a text. Sometimes it begins like the text before it."""
    alphabet = rng.choice(ALPHABETS)
    head = ""
    if earlier and rng.random() < 0.7:
        alphabet = ALPHABETS[earlier[0].isupper()]
        head = earlier[: rng.randint(1, len(earlier))]
    return head + "".join(
        rng.choices(alphabet, k=rng.randint(0 if head else 1, longest - len(head)))
    )


def one_random_operation(mirror: Mirror, rng: random.Random, text: str) -> None:
    start = rng.choice((0, 0, rng.randrange(len(text))))
    model, location = mirror.loaded[rng.choice(NAMES)], rng.choice(LOCATIONS)
    key = (model, rng.choice(PARTS))
    choice = rng.random()
    if choice < 0.28:
        mirror.reserve(key, text, start)
    elif choice < 0.53:
        if mirror.reservations:
            mirror.commit(rng.randrange(len(mirror.reservations)))
    elif choice < 0.56:
        if mirror.reservations:
            mirror.release(rng.randrange(len(mirror.reservations)))
    elif choice < 0.64:
        mirror.lease(model, list({KV, key[1]}), text, start, rng.uniform(1, 5))
    elif choice < 0.70:
        if mirror.leases:
            mirror.end_lease(rng.randrange(len(mirror.leases)))
    elif choice < 0.76:
        mirror.advance(rng.uniform(0, 2))
    elif choice < 0.765:
        mirror.clear()
    elif choice < 0.785:
        mirror.pin(rng.choice((model, None)), text, rng.choice((None, 2.0, 5.0)))
    elif choice < 0.80:
        mirror.unpin(*rng.choice([*mirror.pins, (model, text)]))
    elif choice < 0.805:
        mirror.load(rng.choice(NAMES))
    elif choice < 0.84:
        mirror.add_remote(location, key, text, start)
    elif choice < 0.86:
        one_random_lie(mirror, rng, key, text)
    elif choice < 0.89:
        mirror.drop_remote(location, key, text, start)
    elif choice < 0.90:
        mirror.forget(rng.choice((location, LIAR)))
    else:
        mirror.match(text)


def one_random_lie(mirror: Mirror, rng: random.Random, key: Key, text: str) -> None:
    """Advertise pages of one text, then of another or in another order, at the root or at another
    place."""
    others = [page for _, page in mirror.local] or [text]
    num_other = rng.randrange(len(text))
    pages = prefixes(rng.choice(others)[:num_other], 0) + prefixes(text, num_other)
    if rng.random() < 0.3:
        pages = rng.sample(pages, rng.randint(1, len(pages)))
    had = [place for location, of, place in mirror.remote if (location, of) == (LIAR, key)]
    mirror.lie(key, rng.choice(("", *had)), pages)


def retention_of(seed: int) -> Retention:
    """Return settings in which entries expire, for every second seed."""
    return Retention(ttl_s=4.0 if seed % 2 else None)


def random_walk(seed: int, num_operations: int, longest: int, retention: Retention) -> int:
    """Run random operations on two families at once. Return how many entries were evicted."""
    rng = random.Random(seed)
    budget = (9 + longest) * PAGE
    mirrors = [Mirror(family, budget, retention=retention) for family in FAMILIES]
    text = ""
    while sum(mirror.num_operations for mirror in mirrors) < num_operations:
        text = some_text(rng, longest, text)
        mirror = rng.choice(mirrors)
        one_random_operation(mirror, rng, text)
        mirror.check()
    return sum(mirror.num_evictions for mirror in mirrors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operations", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    args = parser.parse_args()
    num_done = num_evictions = 0
    seed = args.seed
    while num_done < args.operations:
        num_operations = min(20_000, args.operations - num_done)
        longest = (SHALLOW, DEEP)[seed // 8 % 2]
        print(f"operations {num_done} to {num_done + num_operations}: --seed {seed}", flush=True)
        num_evictions += random_walk(seed, num_operations, longest, retention_of(seed))
        num_done += num_operations
        seed += 1
        path.cache_clear()
    summary = {
        "question": "differences between the tree and its oracle",
        "seed": args.seed,
        "operations": num_done,
        "evictions": num_evictions,
        "differences": 0,
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
