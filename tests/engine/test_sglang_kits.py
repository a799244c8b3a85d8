"""SGLang's own tests of a server have the same outcomes with the extension as without.

These tests are in SGLang's wheel and do not need a trained model. The model here has random
weights, and its vocabulary can spell every text that a grammar demands.

Two tests of caches do not run:

- `PrefixCacheBranchingMixin` is for models that cache a state at branches (Mamba), which the
  extension refuses. The radix tree of an attention model has hits that the test forbids.
- `StreamingSessionKitMixin` fails on SGLang alone with a random model of this size.
"""

from __future__ import annotations

import random
import unittest
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
import torch
from engine_parts import CPU, ENV
from forked import ServerSpec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from sglang_droidspeak.fleet.servers import Server, running

pytestmark = [pytest.mark.server, pytest.mark.slow]

VOCAB_SIZE = 32_000
"""Size of the vocabulary. The kits of the radix trees draw tokens below it."""
SEED = 1
ENDS = '"}'
"""Text that the model is likely to write where a grammar allows it, so that strings and objects end
in time."""
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}
"""Environment that SGLang's own fixture of these kits sets. With it, a page that leaks ends the
server."""
CHAT = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"


def kits(name: str) -> tuple[type, ...]:
    """Import the kits of a case. The imports take seconds and only these slow tests need them."""
    from sglang.test.kits.abort_timeout_kit import AbortAllMixin, RunningTimeoutTwoWaveMixin
    from sglang.test.kits.anthropic_messages_kit import AnthropicMessagesMixin
    from sglang.test.kits.basic_api_contract_kit import BasicAPIContractMixin
    from sglang.test.kits.basic_decode_correctness_kit import BasicDecodeCorrectnessMixin
    from sglang.test.kits.basic_scheduler_stress_kit import BasicSchedulerStressMixin
    from sglang.test.kits.ebnf_constrained_kit import EBNFConstrainedMixin
    from sglang.test.kits.json_constrained_kit import JSONConstrainedMixin
    from sglang.test.kits.json_mode_kit import JSONModeMixin
    from sglang.test.kits.kl_divergence_kit import KLDivergenceMixin
    from sglang.test.kits.matched_stop_kit import MatchedStopMixin
    from sglang.test.kits.pause_generation_kit import PauseResumeInPlaceMixin
    from sglang.test.kits.radix_cache_server_kit import run_radix_attention_test
    from sglang.test.kits.regex_constrained_kit import RegexConstrainedMixin
    from sglang.test.kits.streaming_session_kit import AbortLeakReproKitMixin
    from sglang.test.kits.unified_radix_cache_kit import UnifiedRadixTreeTestMixin

    class RadixTreeMixin:
        def test_radix_tree(self):
            random.seed(7)
            run_radix_attention_test(self.base_url)

    others = {
        "kl_divergence": (KLDivergenceMixin,),
        "running_timeout": (RunningTimeoutTwoWaveMixin,),
        "aborted_sessions": (AbortLeakReproKitMixin,),
    }
    if name in others:
        return others[name]
    return (
        RadixTreeMixin,
        AbortAllMixin,
        AnthropicMessagesMixin,
        BasicAPIContractMixin,
        BasicDecodeCorrectnessMixin,
        BasicSchedulerStressMixin,
        EBNFConstrainedMixin,
        JSONConstrainedMixin,
        JSONModeMixin,
        MatchedStopMixin,
        PauseResumeInPlaceMixin,
        RegexConstrainedMixin,
        UnifiedRadixTreeTestMixin,
    )


NEED_ANSWERS = {
    "test_basic_math",
    "test_capital_france",
    "test_color_completion",
    "test_concurrent_requests",
    "test_ebnf_generate_complex_json",
    "test_ebnf_generate_custom_log_format",
    "test_finish_stop_eos",
    "test_finish_stop_regex_str",
    "test_finish_stop_str",
    "test_gsm8k",
    "test_long_prompt",
    "test_regex_generate_complex_json",
    "test_regex_generate_custom_log_format",
    "test_streaming_response",
}
"""Tests of the kits that need right answers, words as an end, or a text with fewer tokens than
bytes."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model. Its tokens are the bytes, three special tokens, and words that no text has."""
    folder = tmp_path_factory.mktemp("model") / "random"
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=65_536,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    torch.manual_seed(SEED)
    random_model = LlamaForCausalLM(config)
    spelled = ["<bos>", "<eos>", "<pad>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    with torch.no_grad():
        for end in ENDS:
            random_model.lm_head.weight[spelled.index(end)] *= 8
    random_model.save_pretrained(folder)
    words = spelled + [f"w{at}" for at in range(len(spelled), VOCAB_SIZE)]
    tokenizer = Tokenizer(models.BPE({word: at for at, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        chat_template=CHAT,
    ).save_pretrained(folder)
    return folder


def outcomes(server: Server, model: Path, kits: tuple[type, ...]) -> Mapping[str, str]:
    """Run every test of the kits. The outcome of each is `passed` or the error that it raised."""
    from sglang.test import kl_test_utils

    chance = random.Random(3)
    fixtures = {
        "base_url": server.url,
        "model": str(model),
        "api_key": "none",
        "client": openai.Client(api_key="none", base_url=f"{server.url}/v1"),
        "process": SimpleNamespace(poll=lambda: None if server.is_alive else 1),
        "input_ids": [[chance.randint(3, 30_000) for _ in range(600)] for _ in range(9)],
        "max_new_tokens": 16,
        "abort_all_num_requests": 8,
        "pause_num_requests": 8,
        "tokenizer": AutoTokenizer.from_pretrained(model),
        "kl_div_thres": 1e-4,
        "kl_div_max_samples": 9,
        "kl_div_prefill_max_new_tokens": 16,
        "kl_div_decode_max_new_tokens": 16,
    }
    # The kit would download LongBench, but looks here first: its default length and number.
    kl_test_utils._cached_input_ids[f"{model}_3000_48"] = fixtures["input_ids"]
    kit = type("Kit", (*kits, unittest.TestCase), fixtures)
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(kit)
    tests = [it for it in suite if it._testMethodName not in NEED_ANSWERS]
    result = unittest.TestResult()
    unittest.TestSuite(tests).run(result)
    bad = {it._testMethodName: text.strip().splitlines()[-1] for it, text in result.failures}
    bad |= {it._testMethodName: text.strip().splitlines()[-1] for it, text in result.errors}
    return {name: bad.get(name, "passed") for name in sorted(it._testMethodName for it in tests)}


@pytest.mark.parametrize(
    ("name", "options", "env"),
    [
        ("kits", {}, {}),
        ("kl_divergence", {}, {}),
        ("running_timeout", {}, {"SGLANG_REQ_RUNNING_TIMEOUT": "4"}),
        (
            "aborted_sessions",
            {"enable-streaming-session": True, "context-length": 512, "chunked-prefill-size": 4096},
            STRICT,
        ),
    ],
)
def test_sglangs_own_tests_come_out_as_without_the_extension(model, name, options, env, tmp_path):
    results = []
    settings = {"host_gb": 0.1, "capture_layers": [1]}
    for folder, droidspeak in (("without", None), ("with", settings)):
        spec = ServerSpec(
            model=model,
            name=folder,
            options=CPU | {"chunked-prefill-size": 512, **options},
            droidspeak=droidspeak,
        )
        with running(spec, folder=tmp_path / folder, env={**ENV, **env}) as (server,):
            results.append(outcomes(server, model, kits(name)))
    without, with_extension = results
    assert without == dict.fromkeys(without, "passed")
    assert with_extension == without
