"""One model plans on a context, the other continues on the same context and that plan.

An SGLang frontend program with two `RuntimeEndpoint`s. It needs both servers; see
docs/quickstart.md. The planner reads the context and writes a question; the writer answers the
question. The writer prefills neither the context nor the planner's words in full: most of their
layers' KV is the planner's.
"""

from __future__ import annotations

import argparse
import json
import sys

import requests
import sglang as sgl

CONTEXT = (
    "<bos> meet zurum . she works for punmo . she likes rice . she has a silver hen . she lives "
    "in kalita . meet vitul . she likes pears . she has a pink swan . she works for motvo . "
    "meet bamaz . she has a green hen . she lives in biraki . she likes pasta . she works for "
    "nalvo . meet duvib . she likes honey . she has a purple crow . she lives in sakuga . she "
    "works for segso . meet zarer . she likes olives . she lives in tuvivu . she works for "
    "gupfo . she has a brown toad ."
)


class Model(sgl.RuntimeEndpoint):
    """A server, with controls for its cache that SGLang's frontend cannot express."""

    def __init__(self, url: str, **droidspeak: str) -> None:
        super().__init__(url)
        self._custom_params = {"droidspeak": droidspeak}

    def generate(self, s, sampling_params):
        sampling = {**sampling_params.to_srt_kwargs(), "custom_params": self._custom_params}
        body = {"text": s.text_, "sampling_params": sampling}
        reply = requests.post(f"{self.base_url}/generate", json=body, timeout=60)
        self._assert_success(reply)
        return reply.json()["text"], reply.json()["meta_info"]


@sgl.function
def plan(s, context: str):
    s += context
    s += sgl.gen("question", max_tokens=6, temperature=0)


@sgl.function
def conclude(s, planned: str):
    s += planned
    s += sgl.gen("answer", max_tokens=8, temperature=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sender", default="http://127.0.0.1:30000")
    parser.add_argument("--receiver", default="http://127.0.0.1:30001")
    args = parser.parse_args()
    # The server answers once the writer knows that it may read the context and the words.
    planner = Model(args.sender, publish="before_reply")
    # By default the server reuses only if it predicts a gain, which is unlikely for a model this
    # small.
    writer = Model(args.receiver, block="2:5")

    planned = plan.run(context=CONTEXT, backend=planner)
    concluded = conclude.run(planned=planned.text(), backend=writer)

    print(f"planner: {planned['question'].strip()}")
    print(f"writer: {concluded['answer'].strip()}")
    print(json.dumps(concluded.get_meta_info("answer")["droidspeak"]))


if __name__ == "__main__":
    try:
        main()
    except OSError as exc:
        sys.exit(f"a server is not reached ({exc}); start both first")
