"""Ask a running SGLang server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import requests

from sglang_droidspeak.fleet import ServerFailed

_FLUSH_S: Final = 5.0
_LOOK_S: Final = 0.05


def ask_server(method: str, url: str, **options: Any) -> requests.Response:
    """Send a request, without the environment's proxy: a proxy cannot reach a fleet's servers."""
    # Not by "no_proxy": `requests` would write it into the environment, which threads share.
    return requests.request(method, url, proxies={"http": "", "https": ""}, **options)


class Client:
    """Client of the server at `url`. Every prompt names the LoRA adapter `adapter`, if given."""

    def __init__(self, url: str, key: str | None = None, adapter: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._named = {"lora_path": adapter} if adapter else {}

    def generate(
        self, prompt: str | Sequence[int], *, timeout_s: float = 120.0, **asked: Any
    ) -> dict[str, Any]:
        """Return a greedy completion from `/generate`. `asked` are options of `_body`. Raises
        requests.HTTPError on an error status."""
        return self.post("/generate", timeout_s, **self._named, **_body(prompt, **asked))

    def replies(
        self, prompt: str | Sequence[int], *, timeout_s: float = 120.0, **asked: Any
    ) -> Iterator[dict[str, Any]]:
        """Stream a completion: yield the reply so far at each token. Takes `generate`'s options."""
        body = self._named | _body(prompt, **{"stream": True, **asked})
        options: dict[str, Any] = {"json": body, "timeout": timeout_s, "stream": True}
        with self._ask("POST", "/generate", **options) as reply:
            reply.raise_for_status()
            for line in reply.iter_lines():
                if line.startswith(b"data: {"):
                    yield json.loads(line.removeprefix(b"data: "))

    def stream(self, prompt: str | Sequence[int], **asked: Any) -> tuple[float, dict[str, Any]]:
        """Return the seconds until the first token arrived, and the last reply of the stream."""
        begun_s = time.perf_counter()
        replies = self.replies(prompt, **asked)
        last = next(replies, None)
        ttft_s = time.perf_counter() - begun_s
        if last is None:
            raise ServerFailed(f"{self.url} ended a stream without a token")
        for reply in replies:
            last = reply
        return ttft_s, last

    def post(self, path: str, timeout_s: float = 60, /, **body: Any) -> dict[str, Any]:
        """Return the answer of any JSON endpoint. Raises requests.HTTPError on an error status."""
        reply = self._ask("POST", path, json=body, timeout=timeout_s)
        reply.raise_for_status()
        return reply.json()

    def flush(self) -> None:
        """Empty the server's own radix cache. Retry for some seconds while the server is busy."""
        deadline_s = time.monotonic() + _FLUSH_S
        while self._ask("POST", "/flush_cache", timeout=10).status_code != 200:
            if time.monotonic() > deadline_s:
                raise ServerFailed(f"{self.url} did not flush its cache within {_FLUSH_S:.0f} s")
            time.sleep(_LOOK_S)

    def _ask(self, method: str, path: str, **options: Any) -> requests.Response:
        return ask_server(method, f"{self.url}{path}", headers=self._headers, **options)


def _body(
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int = 16,
    droidspeak: Mapping[str, Any] | None = None,
    **payload: Any,
) -> dict[str, Any]:
    """Return the body of a request to `/generate`. `payload` has further fields."""
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": max_new_tokens}
    if droidspeak is not None:
        params["custom_params"] = {"droidspeak": dict(droidspeak)}
    return {
        "text" if isinstance(prompt, str) else "input_ids": prompt,
        **payload,
        "sampling_params": params | payload.get("sampling_params", {}),
    }
