"""The real binary of Shepherd Model Gateway in front of two engines that read from a sender."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import requests
from engine_parts import CPU, ENV, answer, eventually, prompt
from forked import ServerSpec

from sglang_droidspeak.fleet.servers import end_of, free_port, running

SMG = os.environ.get("SMG") or shutil.which("smg")

pytestmark = [
    pytest.mark.server,
    pytest.mark.slow,
    pytest.mark.skipif(
        SMG is None,
        reason="no smg: install the package into an environment of its own, and name its command "
        "in the variable SMG",
    ),
]

PAIRS = Path(__file__).parents[2] / "examples" / "pairs"


@contextmanager
def gateway(urls: Sequence[str], folder: Path) -> Iterator[str]:
    port, log = free_port(), folder / "smg.log"
    arguments = ["--worker-urls", *urls, "--policy", "cache_aware", "--host", "127.0.0.1"]
    arguments += ["--port", str(port), "--prometheus-port", str(free_port())]
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(SMG), "launch", *arguments],
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + 60
        while not _is_ready(url):
            assert process.poll() is None and time.monotonic() < deadline_s, end_of(log)
            time.sleep(0.1)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        return requests.get(f"{url}/readiness", timeout=2).status_code == 200
    except requests.RequestException:
        return False


def asked(url: str, tokens: Sequence[int], **more: Any) -> requests.Response:
    params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    body = {"input_ids": list(tokens), "sampling_params": params, **more}
    reply = requests.post(f"{url}/generate", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    return reply


def test_requests_pass_reuse_is_told_and_an_engine_that_dies_costs_nobody(tmp_path):
    listen, profile = f"tcp://127.0.0.1:{free_port()}", str(PAIRS / "sender_to_receiver.json")
    options = {**CPU, "max-total-tokens": 4096}
    sender_spec = ServerSpec(
        model=PAIRS / "weights/sender",
        name="sender",
        options=options,
        droidspeak={"listen": listen, "profiles": [profile]},
    )
    reads = {"peers": [listen], "profiles": [profile], "host_gb": 0, "min_tokens": 16}
    specs = [
        ServerSpec(
            model=PAIRS / "weights/receiver",
            name=f"receiver-{i}",
            options=options,
            droidspeak=reads,
        )
        for i in range(2)
    ]
    prompts = [prompt(257, seed) for seed in range(4)]
    with (
        running(sender_spec, *specs, folder=tmp_path, env=ENV) as (sender, *receivers),
        gateway([it.url for it in receivers], tmp_path) as url,
    ):
        for tokens in prompts:
            answer(sender, tokens, max_new_tokens=1)
        alone = answer(receivers[0], prompts[0], max_new_tokens=4)
        whole = asked(url, prompts[0]).json()
        assert whole["output_ids"] == alone.ids
        outcomes = {
            asked(url, it).json()["meta_info"]["droidspeak"][0]["outcome"] for it in prompts
        }
        assert outcomes & {"reused", "own", "too_short", "on_device"}, outcomes
        lines = asked(url, prompts[1], stream=True).text.splitlines()
        events = [json.loads(it.removeprefix("data: ")) for it in lines if it.startswith("data: {")]
        assert len(events) > 1 and events[-1]["meta_info"]["droidspeak"]

        receivers[0].kill()
        eventually(lambda: not receivers[0].is_alive)
        for tokens in prompts:
            assert asked(url, tokens).json()["output_ids"]
