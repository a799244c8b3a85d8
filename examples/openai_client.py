"""The receiver through the OpenAI client. Needs both servers; see docs/quickstart.md.

A completion has no place for `meta_info`. It only shows how many prompt tokens were cached, here or
at the sender, and only if the server runs with `--enable-cache-report`. A chat completion that is
not streamed has `meta_info` in its `choices`, if the request says `return_meta_info: true`.
"""

from __future__ import annotations

import argparse
import sys

from openai import APIConnectionError, OpenAI

# The receiver has answered no question about it, so every cached token is the sender's.
DOCUMENT = (
    "<bos> meet zurum . she works as a judge . she lives in pevoda . she has a silver duck . "
    "meet dokav . she lives in dakeza . she works as a plumber . she has a grey sheep . "
    "meet zagam . she has a brown goose . she works as a doctor . she lives in rudale . "
    "meet leluk . she lives in mofima . she works as a plumber . she has a purple parrot . "
    "meet dovon . she works as a farmer . she has a white sheep . she lives in duguvu ."
)
QUESTION = "question : what job has zagam ?"


def complete(url: str, prompt: str, max_tokens: int, droidspeak: dict[str, str]) -> tuple[str, int]:
    """Ask the server; return the answer and the number of cached prompt tokens."""
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    reply = client.completions.create(
        model="any",
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"custom_params": {"droidspeak": droidspeak}},
    )
    details = reply.usage.prompt_tokens_details
    return reply.choices[0].text.strip(), details.cached_tokens if details else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sender", default="http://127.0.0.1:30000")
    parser.add_argument("--receiver", default="http://127.0.0.1:30001")
    args = parser.parse_args()

    # The server answers once the receiver knows that it may read.
    complete(args.sender, DOCUMENT, max_tokens=1, droidspeak={"publish": "before_reply"})
    # Without a block the server chooses. It prefills in full if reuse would be no faster, as is
    # likely for a model this small. {"mode": "off"} would ask for a full prefill.
    answer, num_cached = complete(
        args.receiver, f"{DOCUMENT} {QUESTION}", max_tokens=8, droidspeak={"block": "2:5"}
    )
    print(f"{QUESTION} {answer}")
    print(f"cached tokens: {num_cached}")


if __name__ == "__main__":
    try:
        main()
    except APIConnectionError as exc:
        sys.exit(f"{exc.request.url} is not reached; start both servers first")
