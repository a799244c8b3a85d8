"""Profiles of lines that were made up, not measured."""

from __future__ import annotations

import msgspec
from profile_parts import profile_of

from cachetree.checkpoint import Weights
from cachetree.planning import BlockQuality, Line, LineProfile


def line_of(models, proven, **others):
    """Return a profile of a line. Its plan loads everything, and is proven for these changes of
    weights."""
    named = [it.identity if isinstance(it, Weights) else it for it in models]
    identities = [it for it in named if it is not None]
    blocks = (
        BlockQuality(start=0, stop=0, quality=0.97, tv_bound=0.03),
        BlockQuality(start=0, stop=identities[-1].num_layers, quality=1.0),
    )
    pair = profile_of(identities[-2], identities[-1], *blocks, **others)
    line = Line(
        models=tuple(identities),
        names=tuple(f"v{number}" for number, _ in enumerate(identities, start=1)),
        distances=(proven,) * (len(identities) - 1),
    )
    fields = {it: getattr(pair, it) for it in pair.__struct_fields__}
    profile = LineProfile(**fields, line=line)
    assert msgspec.json.decode(msgspec.json.encode(profile), type=LineProfile) == profile
    return profile
