"""Two real servers, one with SGLang's attention and one with ours, give equal answers. A LoRA
adapter changes the answers of both alike."""

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from forked import ServerSpec
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sglang_droidspeak.fleet.servers import Server, running

pytestmark = pytest.mark.server

NUM_WORDS, HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS = 256, 128, 256, 3, 4, 2
CPU = {
    "device": "cpu",
    "dtype": "float32",
    "max-total-tokens": 8192,
    "max-running-requests": 8,
    "chunked-prefill-size": 256,
    "sleep-on-idle": True,
}
ENV = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


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
    """Write a LoRA adapter as PEFT does. It has q, k and v, because SGLang fuses these three."""
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


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Server]]:
    folder = tmp_path_factory.mktemp("torch_cpu")
    base = make_base(folder / "base")
    adapters = {"adapter": make_adapter(folder / "adapter", base)}
    stock = {"attention-backend": "torch_native"}
    specs = [
        ServerSpec(model=base, name=name, options=CPU | options, adapters=adapters)
        for name, options in (("stock", stock), ("ours", {}))
    ]
    with running(*specs, folder=folder, env=ENV) as started:
        yield started


def generate(server: Server, text: str | list[str], **fields: object) -> list[dict]:
    sampling = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    body = {"text": text, "sampling_params": sampling, "return_logprob": True} | fields
    answer = server.post("/generate", **body)
    return answer if isinstance(answer, list) else [answer]


def words(count: int, seed: int) -> str:
    choose = random.Random(seed)
    return " ".join(f"w{choose.randrange(3, NUM_WORDS)}" for _ in range(count))


def logprobs(answer: dict) -> list[float]:
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def assert_same(ours: list[dict], stock: list[dict]) -> None:
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine["text"] == theirs["text"]
        assert logprobs(mine) == pytest.approx(logprobs(theirs), abs=1e-4)


def test_the_platform_chose_its_backend(servers: list[Server]) -> None:
    stock, ours = servers
    assert "'attention_backend': 'torch_native'" in stock.log.read_text()
    assert "'attention_backend': 'torch_cpu'" in ours.log.read_text()


def test_answers_equal_the_stock_backend(servers: list[Server]) -> None:
    shared = words(640, seed=1)  # longer than two chunks
    cold = [generate(server, f"{shared} {words(20, seed=2)}") for server in servers]
    assert_same(cold[1], cold[0])
    batch = [f"{shared} {words(n, seed=n)}" for n in (3, 40, 300)] + [words(9, seed=5)]
    warm = [generate(server, batch) for server in servers]
    assert_same(warm[1], warm[0])
    cached = [answer["meta_info"]["cached_tokens"] for answer in warm[1]]
    assert all(640 - 16 <= n <= 640 for n in cached[:3]), cached
    assert len({answer["text"] for answer in warm[1]}) == 4


def test_lora_answers_differ_from_the_base(servers: list[Server]) -> None:
    prompt = words(60, seed=3)
    plain = [generate(server, prompt) for server in servers]
    adapted = [generate(server, prompt, lora_path="adapter") for server in servers]
    assert_same(plain[1], plain[0])
    assert_same(adapted[1], adapted[0])
    assert adapted[1][0]["text"] != plain[1][0]["text"]
