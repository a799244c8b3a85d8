"""One document and five roles on it, each an adapter of one base; with reuse and without.

An SGLang frontend program: the base reads the document, and the function forks into the roles. It
needs the server of `lora.yaml`; see docs/lora.md. SGLang's frontend has no word for an adapter. So
the backend here takes the adapter from a variable of the state that sends the request.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import requests
import sglang as sgl

from cachetree.checkpoint import read_model_identity

DOCUMENT = (
    "<bos> teral works for roflo . meet zurum . she works for punmo . she likes rice . she has a "
    "silver hen . she lives in kalita . meet vitul . she likes pears . she has a pink swan . she "
    "works for motvo . meet bamaz . she has a green hen . she lives in biraki . she likes pasta . "
    "she works for nalvo . meet duvib . she likes honey . she has a purple crow . she lives in "
    "sakuga . she works for segso . meet zarer . she likes olives . she lives in tuvivu . she "
    "works for gupfo . she has a brown toad ."
)
QUESTIONS = {
    "expert": "question : what likes bamaz ?",
    "trainee": "question : what firm has bamaz ?",
    "clerk": "question : what likes zarer ?",
    "guide": "question : where lives duvib ?",
    "scout": "question : what firm has teral ?",
}
"""Questions by role. `scout` is an activated adapter: only `question :` invokes it, so the base's
KV of the document fits."""
BASE = read_model_identity(Path(__file__).parent / "pairs/weights/foundation").model_id
RECOMPUTED = {
    "expert": {"block": "0:5"},
    "clerk": {"block": "0:5"},
    "scout": {"block": "none", "sender": BASE},
}
"""Block that each role's profile recommends, asked for by name; `scout` takes the base's KV
unchanged. By default the server reuses only if it predicts a gain, which is unlikely for models so
small."""


class Adapters(sgl.RuntimeEndpoint):
    """A server with LoRA adapters. A state's variable `adapter` names the adapter that answers;
    without it, the base answers."""

    def __init__(self, url: str, mode: str) -> None:
        super().__init__(url)
        self._mode = mode

    def generate(self, s, sampling_params):
        return self._ask(s, sampling_params.to_srt_kwargs())

    def commit_lazy_operations(self, s):
        """Read the states' common text once, before they fork."""
        self._ask(s, {"max_new_tokens": 0})

    def _ask(self, s, sampling_params):
        adapter = s.variables.get("adapter")
        controls = {"mode": self._mode, **RECOMPUTED.get(adapter, {})}
        body = {
            "text": s.text_,
            "lora_path": adapter,
            "sampling_params": {**sampling_params, "custom_params": {"droidspeak": controls}},
            "stream": True,
        }
        started_s, ttft_s, reply = time.perf_counter(), None, {}
        with requests.post(f"{self.base_url}/generate", json=body, stream=True, timeout=60) as got:
            self._assert_success(got)
            for line in got.iter_lines():
                if line.startswith(b"data: {"):
                    ttft_s = ttft_s or time.perf_counter() - started_s
                    reply = json.loads(line.removeprefix(b"data: "))
        return reply["text"], {**reply["meta_info"], "ttft_ms": 1000 * ttft_s}


@sgl.function
def discuss(s, document: str, questions: dict[str, str]):
    s += document
    s.sync()  # The base reads the text so far.
    forks = s.fork(len(questions))
    for fork, (role, question) in zip(forks, questions.items(), strict=True):
        fork.set_var("adapter", role)
        fork += " " + question
        fork += sgl.gen("answer", max_tokens=8, temperature=0)
    forks.join()
    return [(fork["answer"].strip(), fork.get_meta_info("answer")) for fork in forks]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", default="http://127.0.0.1:30000")
    url = parser.parse_args().server
    print(f"{'reuse':6} {'role':8} {'answer':8} {'cached':>6} {'reused':>6} {'TTFT':>7}  outcome")
    for mode in ("off", "auto"):
        backend = Adapters(url, mode)
        backend.flush_cache()
        answers = discuss.run(document=DOCUMENT, questions=QUESTIONS, backend=backend).ret_value
        for role, (answer, meta) in zip(QUESTIONS, answers, strict=True):
            (provenance,) = meta["droidspeak"]
            reused = provenance["reused_tokens"]
            print(
                f"{mode:6} {role:8} {answer:8} {meta['cached_tokens'] - reused:6} {reused:6} "
                f"{meta['ttft_ms']:4.0f} ms  {provenance['outcome']}"
            )


if __name__ == "__main__":
    try:
        main()
    except OSError as exc:
        sys.exit(f"the server is not reached ({exc}); start it first")
