"""Two real servers, stock attention and ours, answer the same requests; LoRA answers otherwise."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

pytestmark = pytest.mark.server

NUM_WORDS, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 256, 128, 256, 3, 4, 2
START_DEADLINE_S = 240


def make_base(folder: Path) -> Path:
    torch.manual_seed(0)
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"w{i}": i for i in range(3, NUM_WORDS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=NUM_WORDS,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=2048,
        initializer_range=0.2,  # large enough for answers to depend on the context
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).float().save_pretrained(folder)
    return folder


def make_adapter(folder: Path, base: Path) -> Path:
    """A LoRA adapter as PEFT writes it; SGLang fuses q, k and v and wants all three."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(1)
    kv = HIDDEN // HEADS * KV_HEADS
    sizes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (HIDDEN, kv),
        "self_attn.v_proj": (HIDDEN, kv),
        "mlp.down_proj": (INTERMEDIATE, HIDDEN),
    }
    weights = {}
    for layer in range(LAYERS):
        for name, (inputs, outputs) in sizes.items():
            key = f"base_model.model.model.layers.{layer}.{name}"
            weights[f"{key}.lora_A.weight"] = torch.randn(8, inputs, generator=generator) * 0.2
            weights[f"{key}.lora_B.weight"] = torch.randn(outputs, 8, generator=generator) * 0.2
    save_file(weights, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "target_modules": [name.split(".")[1] for name in sizes],
        "r": 8,
        "lora_alpha": 16,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def free_port() -> int:
    """Not one that the system hands to outgoing connections, which could take it meanwhile."""
    while True:
        port = random.SystemRandom().randrange(20000, 32768)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


class Server:
    """`python -m sglang.launch_server --device cpu` in a process group of its own."""

    def __init__(self, model: Path, log: Path, *options: str) -> None:
        self.log, self.url = log, f"http://127.0.0.1:{(port := free_port())}"
        environment = {k: v for k, v in os.environ.items() if k != "SGLANG_USE_CPU_ENGINE"}
        command = [sys.executable, "-m", "sglang.launch_server", "--device", "cpu"]
        command += ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)]
        command += ["--dtype", "float32", "--page-size", "16", "--max-total-tokens", "8192"]
        command += ["--max-running-requests", "8", "--chunked-prefill-size", "256"]
        command += ["--skip-server-warmup", "--sleep-on-idle", *options]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=environment | {"SGLANG_TORCH_CPU_START": "fork", "OMP_NUM_THREADS": "1"},
            )

    def wait(self) -> None:
        deadline = time.monotonic() + START_DEADLINE_S
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
        raise AssertionError(f"no server:\n{self.log.read_text()[-4000:]}")

    def generate(self, text: str | list[str], **fields: object) -> list[dict]:
        sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
        body = {"text": text, "sampling_params": sampling, "return_logprob": True} | fields
        request = urllib.request.Request(
            f"{self.url}/generate",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
        return answer if isinstance(answer, list) else [answer]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server]]:
    folder = tmp_path_factory.mktemp("torch_cpu")
    base = make_base(folder / "base")
    adapter = make_adapter(folder / "adapter", base)
    lora = ("--enable-lora", "--lora-paths", f"adapter={adapter}")
    started = []
    try:
        started.append(
            Server(base, folder / "stock.log", "--attention-backend", "torch_native", *lora)
        )
        started.append(Server(base, folder / "ours.log", *lora))
        for server in started:
            server.wait()
        yield started[0], started[1]
    finally:
        for server in started:
            server.close()


def words(count: int, seed: int) -> str:
    choose = random.Random(seed)
    return " ".join(f"w{choose.randrange(3, NUM_WORDS)}" for _ in range(count))


def logprobs(answer: dict) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def assert_same(ours: list[dict], stock: list[dict]) -> None:
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine["text"] == theirs["text"]
        assert logprobs(mine) == pytest.approx(logprobs(theirs), abs=1e-4)


def test_the_platform_chose_its_backend(servers: tuple[Server, Server]) -> None:
    stock, ours = servers
    assert "'attention_backend': 'torch_native'" in stock.log.read_text()
    assert "'attention_backend': 'torch_cpu'" in ours.log.read_text()


def test_answers_equal_the_stock_backend(servers: tuple[Server, Server]) -> None:
    shared = words(640, seed=1)  # longer than two chunks
    cold = [server.generate(f"{shared} {words(20, seed=2)}") for server in servers]
    assert_same(cold[1], cold[0])
    batch = [f"{shared} {words(n, seed=n)}" for n in (3, 40, 300)] + [words(9, seed=5)]
    warm = [server.generate(batch) for server in servers]
    assert_same(warm[1], warm[0])
    cached = [answer["meta_info"]["cached_tokens"] for answer in warm[1]]
    assert all(640 - 16 <= n <= 640 for n in cached[:3]), cached
    assert len({answer["text"] for answer in warm[1]}) == 4


def test_lora_answers_differ_from_the_base(servers: tuple[Server, Server]) -> None:
    prompt = words(60, seed=3)
    plain = [server.generate(prompt) for server in servers]
    adapted = [server.generate(prompt, lora_path="adapter") for server in servers]
    assert_same(plain[1], plain[0])
    assert_same(adapted[1], adapted[0])
    assert adapted[1][0]["text"] != plain[1][0]["text"]
