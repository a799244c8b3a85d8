"""One replica at one rate, measured by this study's client and by others.

`sglang.benchmark.serving` comes with SGLang. AIPerf wants versions of packages that SGLang does
not, so it needs an environment of its own, whose `aiperf` is named by `--aiperf`. Each client draws
its own Poisson arrivals; all ask about the same documents, each once.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .arrivals import at_rate, poisson
from .client import Ask, run
from .measures import summary
from .rig import Rig
from .studies import ALONE, SEED, Found, Idle, Say

LOAD = 0.5
TIMEOUT_S = 300
TOLD = ("median_ttft_ms", "p99_ttft_ms", "median_e2e_latency_ms", "request_throughput")

Controls = Mapping[str, Any] | None


def witnesses(idle: Idle, say: Say) -> Found:
    it = idle.rig
    clients: dict[str, Callable[[Rig, Controls, float, Path], Mapping[str, Any]]] = {
        "this study's": _ours,
        "sglang.benchmark.serving": _of_sglang,
    }
    if it.size.aiperf:
        clients["AIPerf"] = _of_aiperf
    rate = LOAD * idle.capacity_per_s / it.size.num_replicas
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for arm in (ALONE, "block"):
            for name, measured in clients.items():
                say(f"{arm} by {name}, {rate:.2f} requests/s")
                it.flush()
                found = measured(it, idle.contenders[arm], rate, Path(folder))
                rows.append({"arm": arm, "client": name, **{key: found[key] for key in TOLD}})
    return Found({"request_rate": rate, "rows": rows}, rows)


def _ours(it: Rig, controls: Controls, rate: float, folder: Path) -> Mapping[str, Any]:
    url, size = it.replica(0, controls).url, it.size
    due = at_rate(poisson(size.num_documents, SEED), rate)
    asks = [
        Ask(
            at_s=at_s,
            url=url,
            document=of,
            tokens=it.documents[of],
            num_new=size.new_tokens,
            controls=controls,
        )
        for of, at_s in enumerate(due)
    ]
    return summary(run(asks), rate, 1.0)


def _of_sglang(it: Rig, controls: Controls, rate: float, folder: Path) -> Mapping[str, Any]:
    data, out = folder / "conversations.jsonl", folder / "sglang.jsonl"
    answer = _words([4] * it.size.new_tokens)
    turns = [[{"value": _words(of)}, {"value": answer}] for of in it.documents]
    data.write_text("".join(json.dumps({"conversations": of}) + "\n" for of in turns))
    sampling = {"max_new_tokens": it.size.new_tokens, **_sampling(controls)}
    told = {
        "backend": "sglang",
        "base-url": it.replica(0, controls).url,
        "model": it.receiver,
        "dataset-name": "custom",
        "dataset-path": data,
        "num-prompts": len(it.documents),
        "request-rate": rate,
        "warmup-requests": 0,
        "extra-request-body": json.dumps({"sampling_params": sampling}),
        "output-file": out,
    }
    _called([sys.executable, "-m", "sglang.benchmark.serving"], told)
    found: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
    return found


def _of_aiperf(it: Rig, controls: Controls, rate: float, folder: Path) -> Mapping[str, Any]:
    data, out = folder / "texts.jsonl", folder / "aiperf"
    data.write_text("".join(json.dumps({"text": _words(of)}) + "\n" for of in it.documents))
    told = {
        "url": it.replica(0, controls).url,
        "model": it.receiver,
        "tokenizer": it.receiver,
        "endpoint-type": "completions",
        "extra-inputs": json.dumps({"max_tokens": it.size.new_tokens, **_sampling(controls)}),
        "input-file": data,
        "custom-dataset-type": "single_turn",
        "request-count": len(it.documents),
        "request-rate": rate,
        "artifact-dir": out,
        "ui": "none",
    }
    switches = ("--streaming", "--no-server-metrics", "--no-gpu-telemetry")
    _called([it.size.aiperf, "profile", *switches], told)
    found = json.loads((out / "profile_export_aiperf.json").read_text())
    ttft, latency = found["time_to_first_token"], found["request_latency"]
    return {
        "median_ttft_ms": ttft["p50"],
        "p99_ttft_ms": ttft["p99"],
        "median_e2e_latency_ms": latency["p50"],
        "request_throughput": found["request_throughput"]["avg"],
    }


def _sampling(controls: Controls) -> dict[str, Any]:
    more = {} if controls is None else {"custom_params": {"droidspeak": dict(controls)}}
    return {"temperature": 0, "ignore_eos": True, **more}


def _words(tokens: Sequence[int]) -> str:
    """Text that the random models' tokenizer makes these tokens of."""
    return " ".join(f"w{it}" for it in tokens)


def _called(command: Sequence[str], told: Mapping[str, Any]) -> None:
    flags = [word for name, value in told.items() for word in (f"--{name}", str(value))]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
