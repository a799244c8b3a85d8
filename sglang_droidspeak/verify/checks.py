"""Checks of two running servers. Each check sends requests, and yields lines with expected and
actual results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Final

import msgspec
import requests

from cachetree import CacheTreeError
from profiles.data.documents import common_start
from sglang_droidspeak.fleet.client import Client
from sglang_droidspeak.guard.plans import GuardState
from sglang_droidspeak.request.outcomes import advice_on
from sglang_droidspeak.verify.answer import Answer, ask, difference, distance_of, new_salt
from sglang_droidspeak.verify.check import Check
from sglang_droidspeak.verify.prompts import Prompt, detokenize, tokenize

PUBLISH: Final = {"publish": "before_reply"}
_CORPUS: Final = (
    "Plain words, 1,234.5 and 007; naïve café; Привет, 你好, こんにちは, שלום, ١٢٣; 🙂🚀; "
    "def f(x):\n\treturn  x ** 2\n"
)
_NO_GAIN: Final = (
    "no time is saved here, and the receiver reuses only if it is asked to: full prefill is "
    "predicted to be as fast; larger models and longer documents gain, see docs/why.md"
)


@dataclass(frozen=True, slots=True)
class Pair:
    """The receiver's answers to one prompt."""

    served: Answer
    """Answer of the receiver with reuse, if reuse works."""
    exact: Answer
    """Answer of the receiver by full prefill."""
    is_chosen: bool
    """Whether the server itself chose to reuse. If not, it predicted that full prefill is as fast,
    and a second request named the block."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """Two servers, or two adapters of one, and the prompts for them."""

    sender: Client
    receiver: Client
    prompts: Sequence[Prompt]
    page: int
    is_own_data: bool
    """Whether prompts are a user's own. Then the profile's bound has to hold for them."""
    flushes: bool
    block: str | None
    """Layers to recompute if the server does not reuse because full prefill is as fast."""
    answers: list[Pair] = field(default_factory=list)
    """Answers to each prompt, filled in by the check `reuse`."""

    @property
    def reused(self) -> list[Pair]:
        return [it for it in self.answers if it.served.label.outcome == "reused"]


def all_checks(run: Run) -> Iterator[Check]:
    """Run all checks, in an order in which the first failure explains later ones."""
    steps: list[tuple[str, Callable[[Run], Iterator[Check]]]] = [("tokenizer", tokenizers)]
    for role in ("sender", "receiver"):
        steps += [(f"{role}: {it.__name__}", _of(role, it)) for it in (device, together, cancel)]
    steps += [("reuse", reuse), ("others", others)]
    yield from _tried(run, steps)
    if run.answers:
        on_answers = (off, labels, distance, ttft)
        yield from _tried(run, [(it.__name__, it) for it in on_answers])


def _tried(
    run: Run, steps: Sequence[tuple[str, Callable[[Run], Iterator[Check]]]]
) -> Iterator[Check]:
    for name, step in steps:
        try:
            yield from step(run)
        except (requests.RequestException, CacheTreeError) as exc:
            said = f"no answer: {exc}"
            yield Check(name=name, ok=False, found=said, remedy="look into the servers' logs")


def _of(
    role: str, step: Callable[[Run, Client], Iterator[Check]]
) -> Callable[[Run], Iterator[Check]]:
    def checks(run: Run) -> Iterator[Check]:
        for check in step(run, getattr(run, role)):
            yield msgspec.structs.replace(check, name=f"{role}: {check.name}")

    return checks


def tokenizers(run: Run) -> Iterator[Check]:
    """Check that both servers make the same tokens of texts in many scripts. Check also that they
    read the prompts' tokens as the same text."""
    ours, theirs = (tokenize(it, _CORPUS) for it in (run.sender, run.receiver))
    asked = [it.prefix for it in run.prompts]
    text, other = (detokenize(it, asked) for it in (run.sender, run.receiver))
    message = f"{len(ours)} tokens of a text of many scripts, the same from both"
    if ours != theirs:
        at = len(common_start([ours, theirs]))
        message = f"expected the same tokens of one text; they differ from token {at} on"
    elif text != other:
        message = "expected the same text of a prompt's tokens; a token is another word"
    ok = (ours, text) == (theirs, other)
    remedy = "serve both with the same tokenizer files; models of two families share nothing"
    yield Check(name="tokenizer", ok=ok, found=message, remedy=remedy)


def device(run: Run, client: Client) -> Iterator[Check]:
    """Check SGLang's own cache: empty, full hit, partial hit, and after a flush."""
    prompt, salt = run.prompts[0], new_salt()
    first, second = prompt.prefix + prompt.suffixes[0], prompt.prefix + prompt.suffixes[-1]
    cold = ask(client, first, salt, mode="off")
    yield Check(
        name="cold",
        ok=cold.cached_tokens == 0,
        found=f"{cold.cached_tokens:,} tokens cached under a salt that nobody used; expected 0",
        remedy="another tenant's cache was read; " + _log_of(client),
    )
    warm = ask(client, first, salt, mode="off")
    yield _hit("warm", client, warm, (len(first) - 1) // run.page * run.page)
    yield _same("warm answer", client, cold, warm)
    partial = ask(client, second, salt, mode="off")
    yield _hit("partial hit", client, partial, len(prompt.prefix))
    if run.flushes:
        client.flush()
        back = ask(client, first, salt)
        name = "after a flush"
        if back.label.outcome == "own":
            yield _hit(name, client, back, len(prompt.prefix))
            yield _same("answer after a flush", client, cold, back)
        elif back.label.outcome == "slower":
            said = "full prefill is predicted to be as fast as host memory"
            yield Check(name=name, ok=True, found=said)
        else:
            said = f"expected outcome own, from host memory; it was {back.label.outcome}"
            yield Check(name=name, ok=False, found=said, remedy=_why(client, back))


def together(run: Run, client: Client) -> Iterator[Check]:
    """Check that four questions at once get the answers that they get one after the other."""
    prompt, salt = run.prompts[0], new_salt()
    asked = [prompt.prefix + prompt.suffixes[i % len(prompt.suffixes)] for i in range(4)]
    with ThreadPoolExecutor(len(asked)) as pool:
        at_once = [*pool.map(lambda ids: ask(client, ids, salt, mode="off"), asked)]
    alone = [ask(client, ids, new_salt(), mode="off") for ids in asked]
    wrong = [*filter(None, map(difference, alone, at_once))]
    message = "4 questions at once, answered as one by one"
    if wrong:
        message = f"expected the answers of one by one; {len(wrong)} of 4 differ: {wrong[0]}"
    yield Check(name="four at once", ok=not wrong, found=message, remedy=_log_of(client))


def cancel(run: Run, client: Client) -> Iterator[Check]:
    """Check that a cancelled request does not change the next answer."""
    prompt, salt = run.prompts[-1], new_salt()
    ids = list(prompt.prefix + prompt.suffixes[0])
    replies = client.replies(ids, max_new_tokens=512, cache_salt=salt, ignore_eos=True)
    next(replies, None)
    replies.close()  # type: ignore[attr-defined]
    expected = ask(client, ids, new_salt(), mode="off")
    after = ask(client, ids, salt, mode="off")
    wrong = difference(expected, after)
    message = "the next question is answered as ever"
    if wrong:
        message = f"expected the same answer after a cancelled request; {wrong}"
    yield Check(name="cancel", ok=not wrong, found=message, remedy=_log_of(client))


def reuse(run: Run) -> Iterator[Check]:
    """Check that the receiver loads each document's KV from the sender, by the plan of its profile.

    If a load was too late, ask about its document once more.
    """
    num_late = 0
    for number, prompt in enumerate(run.prompts):
        ids = prompt.prefix + prompt.suffixes[0]
        exact = None if number % 2 else ask(run.receiver, ids, new_salt(), mode="off")
        named, is_late = dict[str, str](), False
        while True:
            served = _shared_answer(run, prompt, **named)
            if served.label.outcome == "slower" and run.block and not named:
                named = {"block": run.block}
            elif served.label.outcome.startswith("fallback") and not is_late:
                is_late = True  # One late fetch is no defect.
            else:
                break
        num_late += is_late
        exact = exact or ask(run.receiver, ids, new_salt(), mode="off")
        run.answers.append(Pair(served, exact, is_chosen=not named))
    outcomes = Counter(it.served.label.outcome for it in run.answers)
    came = ", ".join(f"{num} {it}" for it, num in outcomes.most_common())
    wrong = [it.served for it in run.answers if it.served.label.outcome != "reused"]
    if wrong:
        detail = f" ({wrong[0].label.detail})" if wrong[0].label.detail else ""
        message = f"expected {len(run.answers)} reused, came {came}{detail}"
        yield Check(name="reuse", ok=False, found=message, remedy=_why(run.receiver, wrong[0]))
        return
    tokens = sum(it.served.label.reused_tokens for it in run.answers)
    message = f"{came}; {tokens:,} tokens in all"
    if num := sum(not it.is_chosen for it in run.answers):
        message += f"; {num} only because the block was named: full prefill is predicted as fast"
    if num_late:
        message += f"; {num_late} at the second try, as the first load came too late"
    yield Check(name="reuse", ok=True, found=message)


def _shared_answer(run: Run, prompt: Prompt, **controls: str) -> Answer:
    """Return the receiver's answer, after the sender has read the document."""
    salt = new_salt()
    ask(run.sender, prompt.prefix, salt, **PUBLISH)
    return ask(run.receiver, prompt.prefix + prompt.suffixes[0], salt, **controls)


def off(run: Run) -> Iterator[Check]:
    """Check that a request with `mode: off` reads no other model's cache, and gets the answer of a
    server without peers."""
    prompt, exact = run.prompts[0], run.answers[0].exact
    answer = _shared_answer(run, prompt, mode="off")
    label = answer.label
    message = f"outcome {label.outcome}, {label.reused_tokens:,} tokens reused; expected off and 0"
    ok = label.outcome == "off" and not label.reused_tokens
    yield Check(name="mode off", ok=ok, found=message, remedy=_log_of(run.receiver))
    unmatched = ask(run.receiver, prompt.prefix + prompt.suffixes[0], new_salt())
    for name, full in (("off", answer), ("no match", unmatched)):
        yield _same(f"full prefill by {name}", run.receiver, exact, full)


def others(run: Run) -> Iterator[Check]:
    """Check that KV of another document or another tenant is not reused."""
    read, unread, salt = run.prompts[0], run.prompts[-1], new_salt()
    ask(run.sender, read.prefix, salt, **PUBLISH)
    for name, prompt, of, most in (
        ("another document", unread, salt, len(common_start([read.prefix, unread.prefix]))),
        ("another tenant", read, new_salt(), 0),
    ):
        answer = ask(run.receiver, prompt.prefix + prompt.suffixes[0], of)
        yield Check(
            name=name,
            ok=answer.label.reused_tokens <= most,
            found=f"{answer.label.reused_tokens:,} tokens taken; expected at most {most:,}",
            remedy="serve without reuse and report this; " + _log_of(run.receiver),
        )


def labels(run: Run) -> Iterator[Check]:
    """Check that the labels of answers agree with the prompts that were sent."""
    wrong = []
    for prompt, pair in zip(run.prompts, run.answers, strict=False):
        served = pair.served
        label, num = served.label, len(prompt.prefix) + len(prompt.suffixes[0])
        if served.prompt_tokens != num:
            wrong.append(f"prompt_tokens is {served.prompt_tokens} of {num} that were sent")
        elif label.outcome == "reused" and not (
            0 < label.reused_tokens <= served.cached_tokens <= num
        ):
            wrong.append(
                f"reused_tokens {label.reused_tokens}, cached_tokens {served.cached_tokens}"
            )
        elif label.outcome == "reused" and not label.sender:
            wrong.append("a reused answer names no sender")
    message = f"{len(run.answers)} of {len(run.answers)} agree with what was sent"
    if wrong:
        message = f"expected labels as sent; {wrong[0]}"
    yield Check(name="labels", ok=not wrong, found=message, remedy=_log_of(run.receiver))


def distance(run: Run) -> Iterator[Check]:
    """Check that answers with reuse are as close to full prefill's as the profile promises."""
    exact = [it for it in run.reused if it.served.label.exact]
    inexact = [it for it in run.reused if not it.served.label.exact]
    if exact:
        wrong = [*filter(None, (difference(it.exact, it.served) for it in exact))]
        message = f"{len(exact)} answers say exact, and equal full prefill's"
        if wrong:
            message = f"expected answers that say exact to equal full prefill's; {wrong[0]}"
        remedy = _log_of(run.receiver)
        yield Check(name="exact answers", ok=not wrong, found=message, remedy=remedy)
    if inexact:
        mean = fmean(distance_of(it.served, it.exact) for it in inexact)
        same = sum(not difference(it.exact, it.served) for it in inexact)
        message = f"{mean:.3f} on average, {same} of {len(inexact)} answers the same"
        allowed = _allowed(run, inexact[0].served) if run.is_own_data else None
        if not run.is_own_data:
            message += "; not judged: give --data like the profile's"
        elif allowed is not None:
            message += f"; the profile allows {allowed:.3f}"
        ok = allowed is None or mean <= allowed
        remedy = "make a profile on such prompts; `droidspeak guard` shows what the server has seen"
        yield Check(name="distance", ok=ok, found=message, remedy=remedy)


def ttft(run: Run) -> Iterator[Check]:
    """Check that reuse does not delay the first token, within noise."""
    chosen = [it for it in run.reused if it.is_chosen]
    if not chosen:
        if run.reused:
            yield Check(name="first token", ok=True, found=_NO_GAIN)
        return
    ours, ours_noise = _typical([it.served.ttft_s for it in chosen])
    full, full_noise = _typical([it.exact.ttft_s for it in chosen])
    message = (
        f"{1000 * ours:,.0f} ± {1000 * ours_noise:,.0f} ms with reuse, "
        f"{1000 * full:,.0f} ± {1000 * full_noise:,.0f} ms without: {full / ours:.2f} × as fast"
    )
    ok = ours <= full + ours_noise + full_noise
    remedy = "`droidspeak explain` shows what was predicted; see docs/why.md"
    yield Check(name="first token", ok=ok, found=message, remedy=remedy)


def _typical(times_s: Sequence[float]) -> tuple[float, float]:
    """Return the median and the median absolute deviation."""
    middle = median(times_s)
    return middle, median(abs(it - middle) for it in times_s)


def _allowed(run: Run, answer: Answer) -> float | None:
    """Return the distance that the drift guard allows the answer's plan. None if the guard does not
    watch the plan."""
    state = msgspec.convert(run.receiver.post("/droidspeak/guard"), GuardState)
    key = answer.label.block, answer.label.e_corrected
    plans = [
        it
        for pair in state.pairs
        for it in pair.plans
        if pair.sender == answer.label.sender and it.key == key
    ]
    return plans[0].allowed if plans else None


def _hit(name: str, client: Client, answer: Answer, least: int) -> Check:
    message = f"{answer.cached_tokens:,} tokens cached of {answer.prompt_tokens:,}"
    ok = answer.cached_tokens >= least
    if not ok:
        message += f"; expected {least:,}"
    return Check(name=name, ok=ok, found=message, remedy=_log_of(client))


def _same(name: str, client: Client, one: Answer, other: Answer) -> Check:
    wrong = difference(one, other)
    message = f"expected the same answer; {wrong}" if wrong else "the same greedy tokens"
    return Check(name=name, ok=not wrong, found=message, remedy=_log_of(client))


def _log_of(client: Client) -> str:
    return f"look into the log of the server at {client.url}"


def _why(client: Client, answer: Answer) -> str:
    remedy = advice_on(answer.label.outcome).remedy
    return f"{remedy} `droidspeak explain {answer.id} --url {client.url}` says more"
