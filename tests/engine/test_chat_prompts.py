"""Prompts of a profile that was made with `--chat` equal the prompts of SGLang's OpenAI chat
endpoint."""

from __future__ import annotations

from types import SimpleNamespace

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from profiles.data.datasets import Source, SourcedRecord
from profiles.data.documents import make_documents
from profiles.data.records import Record
from profiles.data.tasks import TaskOptions

CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
CONTEXT = "The red house stands by the river. " * 9
QUESTION = "Which house?"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with bytes as tokens. Each text begins with <bos>."""
    spelled = ["<bos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({word: at for at, word in enumerate(spelled)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", chat_template=CHAT
    )


def test_a_prompt_in_chat_is_what_the_endpoint_makes_of_it():
    """The test calls only the function that renders and encodes; it needs no other part of a
    server."""
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

    tokenizer, task = make_tokenizer(), TaskOptions(chat=True).task_for("hotpotqa")
    endpoint = object.__new__(OpenAIServingChat)
    endpoint.tokenizer_manager = SimpleNamespace(tokenizer=tokenizer)
    endpoint.template_manager = SimpleNamespace(python_chat_template=None)
    endpoint._tokenizer_auto_adds_specials = True
    endpoint._prompt_text_round_trip_is_lossy = endpoint._probe_prompt_text_round_trip()
    assert not endpoint._prompt_text_round_trip_is_lossy
    ids, _ = endpoint._render_and_encode_chat_template(
        [{"role": "user", "content": task.prompt(CONTEXT, QUESTION)}],
        tools=None,
        template_kwargs={},
        encode_kwargs={"add_special_tokens": False},
        use_cache=False,
    )
    record = SourcedRecord(
        record=Record(input=QUESTION, context=CONTEXT, answers=("red",)),
        task=task,
        place="a:1",
        name="a:1",
    )
    (document,) = make_documents(
        [Source(name="a", records=(record,))], tokenizer, page_size=16, max_prompt_tokens=None
    )
    assert [*document.prefix, *document.questions[0].suffix] == list(ids)
