"""What each outcome means: the text of docs/no-reuse.md, and of what a server explains."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple


class Advice(NamedTuple):
    """In Markdown, with links as from docs/."""

    cause: str
    remedy: str


SECTIONS: Final[Mapping[str, Mapping[str, Advice]]] = {
    "fine": {
        "reused": Advice(
            "KV that another model computed was loaded. `exact` is false where the answer "
            "depends on it.",
            "none needed.",
        ),
        "own": Advice(
            "KV that this server itself had computed with this model came back from its host "
            "memory or disk.",
            "none needed. It is exact, unless a [codec](storage.md#fewer-bytes) is set.",
        ),
        "off": Advice(
            "the request asked for no reuse (`mode: off`), or for a "
            "[verified answer](recipes.md#verified-answers) that cannot be verified; `detail` says "
            "so then.",
            "leave `mode` out, or say `auto`.",
        ),
        "aborted": Advice(
            "the request ended before it had read anything.",
            "none needed. Look at the client's time limit if there are many.",
        ),
    },
    "prompt": {
        "no_match": Advice(
            "no model of the family has this prefix, as far as this server knows. Where peers "
            "are not ready, `detail` says how many: `1 of 2 peers not ready`.",
            "see that both prompts begin with the same tokens, whole pages of them: a system "
            "prompt, a date or a chat template that differs at the start leaves nothing in "
            "common. See that `cache_salt` is the same. A sender publishes after it has "
            "answered; a question that comes sooner is a miss, unless the sender's request said "
            "[`publish: before_reply`](reference/requests.md). The sender may have evicted the "
            "prefix: see [sizing](sizing.md). `cachetree match` asks a worker what it has.",
        ),
        "too_short": Advice(
            "fewer than `min_tokens` new tokens would be reused. The device has the rest, "
            "perhaps since the request was planned.",
            "none needed for short prompts. Lower `min_tokens` where shorter reuse pays on your "
            "link.",
        ),
        "logprobs": Advice(
            "the request asks for log-probabilities of the prompt (`echo`). They need a prefill, "
            "and fewer than `min_tokens` are left.",
            "ask for them from a later position of the prompt, or not at all.",
        ),
        "multimodal": Advice(
            "the request has images or other media. Its KV depends on more than tokens and model.",
            "none in this release.",
        ),
        "input_embeds": Advice(
            "the request brings embeddings in place of tokens.",
            "send tokens or text.",
        ),
        "session": Advice(
            "the request belongs to a session of SGLang.",
            "send the whole conversation as a prompt of its own.",
        ),
        "bad_controls": Advice(
            "`custom_params.droidspeak` is wrong. `detail` says how, and what is accepted.",
            "correct it. [Per request](reference/requests.md) has all keys.",
        ),
    },
    "pair": {
        "no_profile": Advice(
            "a model has this prefix, and no profile names the pair (sender, receiver).",
            "[make a profile](profiles.md) and name it under `profiles` at the receiver, and at "
            "the sender too, so that it keeps E. Models are known by content: after training, or "
            "with other weights, a profile has to be made again. `droidspeak identity` prints a "
            "checkpoint's id.",
        ),
        "gate_failed": Advice(
            "the pair has a profile that did not pass.",
            "`droidspeak profile show` says why. Often more held-out data are needed. A pair "
            "that loses too much is served by full prefill.",
        ),
        "longer_than_measured": Advice(
            "the prompt is more than twice as long as the longest that the pair's profile was "
            "measured on. `detail` has both lengths.",
            "make the profile on documents of the length that you serve.",
        ),
        "ungated_block": Advice(
            "the request named a block that no profile has proven. `detail` lists those that are.",
            "name one of them, or none. `gate: off` allows any block, for measurements.",
        ),
        "no_e": Advice(
            "the sender has the prefix, but no E where the block begins. It was stored before "
            "the sender knew of the profile.",
            "give the sender the profile, or `capture_layers`, and send the document again. "
            "Stored again with E there, its pages gain it, unless they have E at a layer at "
            "which the new ones have none. Such pages stay as they are, in memory and on disk, "
            "until they are evicted (`cachetree evict`).",
        ),
    },
    "not_worth_it": {
        "slower": Advice(
            "a full prefill is predicted to be faster, or reuse to save less than the request "
            "would wait for the link while nothing else runs. It may also be found when "
            "everything has been fetched.",
            "none needed: the prediction is from what this server measures. For more reuse take "
            "a faster link, a [codec](storage.md#fewer-bytes), longer shared prefixes, or a "
            "profile with a smaller block. [Break-even](why.md) has the arithmetic.",
        ),
        "recompute_too_long": Advice(
            "`max_recompute_tokens` or `max_stall_ms` allows fewer than `min_tokens`.",
            "raise them. Decoding requests may then wait longer in one step.",
        ),
    },
    "no_room": {
        "staging_full": Advice(
            "fetches under way fill the host memory for them.",
            "raise `staging_gb`.",
        ),
        "no_slots": Advice(
            "there is no room in the device's KV cache.",
            "send fewer requests at a time, or give SGLang more memory (`--mem-fraction-static`).",
        ),
    },
    "weights": {
        "reading_adapter": Advice(
            "the adapter was just loaded. It serves at once, and shares as soon as its files "
            "have been read.",
            "wait.",
        ),
        "unknown_adapter": Advice(
            "the adapter's content could not be read when it was loaded. The log says why.",
            "load it from a folder that the server can read.",
        ),
        "weights_updated": Advice(
            "weights have been updated in place, or that was tried. They may not be the "
            "identified ones any more. From then on nothing is stored, served to peers or reused.",
            "restart the server with the new checkpoint, and make its profiles.",
        ),
    },
    "faults": {
        "error": Advice(
            "planning failed.",
            "the log has the traceback. Please report it.",
        ),
        "fallback: DeadlineExceeded": Advice(
            "not all layers arrived within the request's time.",
            "`cachetree bench` measures the link. `fetch_deadline_s` is the longest time; a "
            "request whose block was not asked for by name waits no longer than reuse would save.",
        ),
        "fallback: SlowLink": Advice(
            "the request would have waited longer than reuse was predicted to save.",
            "none needed if it is rare. See `slower` if it is not.",
        ),
        "fallback: ForwardWaitExceeded": Advice(
            "a forward had waited `forward_wait_s` for layers that were predicted to have arrived.",
            "look for what makes the link uneven. A larger `forward_wait_s` holds up the whole "
            "batch.",
        ),
        "fallback: StaleEntry": Advice(
            "the sender no longer has pages that it had advertised.",
            "give the sender more memory (`host_gb`, `disk_gb`), or pin what is shared for long.",
        ),
        "fallback: ProtocolError": Advice(
            "a peer sent something that does not fit: a wrong size or checksum, an unknown "
            "message.",
            "run the same release on both sides. The log names the peer.",
        ),
        "fallback: FetchError": Advice(
            "the fetch ended before all layers had come: the connection broke, or the peer "
            "ended. With tensor parallelism it may have been another rank's.",
            "`droidspeak peers` shows each peer's state and the reason. The log has more.",
        ),
    },
}

_BY_OUTCOME: Final = {name: it for part in SECTIONS.values() for name, it in part.items()}


def advice_on(outcome: str) -> Advice:
    """As plain text, with links by their files; of a fetch in general where a cause has no text."""
    found = _BY_OUTCOME.get(outcome) or _BY_OUTCOME["fallback: FetchError"]
    return Advice(*(re.sub(r"\[([^]]+)\]\(([^)]+)\)", r"\1 (docs/\2)", it) for it in found))
