import pytest
from hypothesis import given
from hypothesis import strategies as st
from shipped import PAIRS, prompt_of
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cachetree.errors import ConfigError
from profiles.data.datasets import Source, SourcedRecord, load_sources
from profiles.data.documents import data_files, make_documents, split_documents
from profiles.data.metrics import Metric
from profiles.data.records import Record, RecordError, read_records, records_sha256
from profiles.data.tasks import TASKS, Task, TaskOptions, score
from profiles.random_models import numbered_words

PAGE = 16
AS_SHIPPED = TaskOptions(template="<bos> {context} {input}", metric=Metric.F1, max_new=8)
WORDS = Task(name="words", template="<bos> {context} {input}", metric=Metric.F1, max_new=4)


def words(first, num_words):
    return " ".join(f"w{i}" for i in range(first, first + num_words))


def make_source(*questions, task=WORDS, name="words.jsonl"):
    """Write a record for each (context, question, answer)."""
    records = [
        SourcedRecord(
            record=Record(input=question, context=context, answers=(answer,)),
            task=task,
            place=f"{name}:{i}",
            name=f"{name}:{i}",
        )
        for i, (context, question, answer) in enumerate(questions, start=1)
    ]
    return Source(name=name, records=tuple(records))


def make(*questions, task=WORDS, tokenizer=None, page_size=4, max_prompt_tokens=None):
    return make_documents(
        [make_source(*questions, task=task)],
        numbered_words() if tokenizer is None else tokenizer,
        page_size=page_size,
        max_prompt_tokens=max_prompt_tokens,
    )


@pytest.fixture(scope="module")
def shipped_tokenizer():
    return AutoTokenizer.from_pretrained(PAIRS / "weights/receiver")


@pytest.fixture(scope="module")
def byte_pairs():
    """Write a byte-level BPE tokenizer as in Llama 3 and Qwen. It merges words with the space
    before them, merges runs of line ends, and begins every text with <s>."""
    tokenizer = Tokenizer(models.BPE())
    pattern = Regex(r" ?\p{L}+|\d{1,3}| ?[^\s\p{L}\d]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(pattern, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    text = "Question: rain sun wind\n\nAnswer: rain\n    return rain\n\n"
    tokenizer.train_from_iterator([text * 20, *TASKS["hotpotqa"].template.split(".")], trainer)
    start = ("<s>", tokenizer.token_to_id("<s>"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[start]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def test_contexts_that_differ_in_white_space_alone_are_one():
    """The split and the gate count such contexts as one."""
    one, other = "a b c d e f", "a b  c d e f\n"
    (document,) = make((one, "x ?", "y"), (other, "z ?", "y"))
    assert len(document.questions) == 2
    assert document == make((one, "x ?", "y"), (one, "z ?", "y"))[0]


@pytest.mark.parametrize("name", ["train", "held_out"])
def test_the_shipped_questions_are_prompts_of_the_shipped_pairs(shipped_tokenizer, name):
    path = PAIRS / f"data/{name}.jsonl"
    sources = load_sources([str(path)], AS_SHIPPED)
    documents = make_documents(sources, shipped_tokenizer, page_size=PAGE, max_prompt_tokens=None)
    assert len(documents) == 24
    assert {len(document.prefix) // PAGE for document in documents} == {7, 8, 9}
    assert all(len(document.prefix) % PAGE == 0 for document in documents)
    asked = [(document, it) for document in documents for it in document.questions]
    records = read_records(path)
    for (document, question), record in zip(asked, records, strict=True):
        prompt = shipped_tokenizer(prompt_of(record)).input_ids
        assert [*document.prefix, *question.suffix] == prompt
        answer = shipped_tokenizer(f"{record.answers[0]} <eos>").input_ids
        assert list(question.draft) == answer
        assert (question.answers, question.name) == (record.answers, record.id)
        assert score(document.task, record.answers[0], question.answers) == 1.0
    (file,) = data_files(sources, documents)
    assert (file.name, file.num_questions) == (f"{name}.jsonl", 72)
    assert file.sha256 == records_sha256(records)


def test_records_of_one_context_need_not_be_adjacent():
    a, b = words(10, 8), words(50, 8)
    documents = make((a, "w4", "w1"), (b, "w5", "w2"), (a, "w6", "w3"))
    assert [[it.name[-1] for it in document.questions] for document in documents] == [
        ["1", "3"],
        ["2"],
    ]


def test_a_context_under_two_tasks_is_two_documents():
    other = Task(name="other", template="{context} {input}", metric=Metric.F1, max_new=1)
    context = words(10, 8)
    sources = [
        make_source((context, "w4", "w5")),
        make_source((context, "w4", "w5"), task=other, name="other.jsonl"),
    ]
    tokenizer = numbered_words()
    documents = make_documents(sources, tokenizer, page_size=4, max_prompt_tokens=None)
    assert [document.task for document in documents] == [WORDS, other]
    assert [len(document.questions[0].draft) for document in documents] == [2, 1]


def test_at_least_one_token_is_new():
    task = Task(name="t", template="{context}", metric=Metric.F1, max_new=4)
    (document,) = make((words(10, 8), "", "w5"), task=task)
    assert (len(document.prefix), len(document.questions[0].suffix)) == (4, 4)
    (document,) = make((words(10, 9), "", "w5"), task=task)
    assert (len(document.prefix), len(document.questions[0].suffix)) == (8, 1)


def test_a_context_shorter_than_a_page_is_named():
    long, short = words(10, 8), words(10, 2)
    with pytest.raises(RecordError, match=r"words\.jsonl:2: .*3 tokens, less than a page of 4"):
        make((long, "w4", "w5"), (short, "w4 w5 w6", "w5"))


@pytest.mark.parametrize(
    ("answer", "max_new", "expected"), [("w7 w8", 4, [7, 8, 2]), ("w7 w8", 2, [7, 8]), ("", 4, [2])]
)
def test_the_draft_ends_with_eos_or_where_the_answer_must_end(answer, max_new, expected):
    task = Task(name="t", template="{context} {input}", metric=Metric.F1, max_new=max_new)
    (document,) = make((words(10, 8), "w4", answer), task=task)
    assert list(document.questions[0].draft) == expected


def test_without_eos_a_draft_has_the_answers_tokens_alone():
    tokenizer = numbered_words()
    tokenizer.eos_token = None
    (document,) = make((words(10, 8), "w4", "w5"), tokenizer=tokenizer)
    assert document.questions[0].draft == (5,)


@pytest.mark.parametrize("name", ["hotpotqa", "lcc", "repobench-p", "multi_news", "gsm8k"])
def test_prompts_and_answers_are_as_the_tokenizer_makes_them_of_text(byte_pairs, name):
    task = TASKS[name]
    context, answer = "sun rain wind rain.\n\n" * 4, "rain"
    if name in ("lcc", "repobench-p"):
        answer = "    return rain"
    questions = ["Which rain?", "\n\nWhich sun?"]
    (document,) = make(
        *((context, it, answer) for it in questions), task=task, tokenizer=byte_pairs
    )
    for text, question in zip(questions, document.questions, strict=True):
        prompt = task.prompt(context, text)
        assert [*document.prefix, *question.suffix] == byte_pairs(prompt).input_ids
        assert document.prefix[0] == byte_pairs.bos_token_id
        assert question.draft[-1] == byte_pairs.eos_token_id
        separator = "" if prompt.endswith("\n") else " "
        assert byte_pairs.decode(question.draft[:-1]) == separator + answer


@pytest.mark.parametrize(
    ("template", "answer", "expected"),
    [
        ("{context}:", "rain", " rain"),
        ("{context}:\n", "rain", "rain"),
        ("{context}:", "\nrain", "\nrain"),
        ("{context}:", "", ""),
    ],
)
def test_a_space_precedes_the_answer_where_there_is_no_white_space(
    byte_pairs, template, answer, expected
):
    task = Task(name="t", template=template, metric=Metric.F1, max_new=9)
    (document,) = make(("rain sun", "", answer), task=task, tokenizer=byte_pairs, page_size=1)
    assert byte_pairs.decode(document.questions[0].draft[:-1]) == expected


def test_tokens_that_join_context_and_question_are_not_shared(byte_pairs):
    # "\n" and "\n\n" are tokens, so a line end after the context changes the context's last token.
    task = Task(name="t", template="{context}{input}", metric=Metric.F1, max_new=4)
    context = "rain sun\n"
    (alone, joined) = (byte_pairs(context + it).input_ids for it in ("wind", "\nwind"))
    num_common = len(byte_pairs("rain sun").input_ids)
    assert alone[:num_common] == joined[:num_common]
    assert alone[num_common] != joined[num_common]
    (document,) = make(
        (context, "wind", "x"),
        (context, "\nwind", "x"),
        task=task,
        tokenizer=byte_pairs,
        page_size=1,
    )
    assert len(document.prefix) == num_common
    assert [[*document.prefix, *it.suffix] for it in document.questions] == [alone, joined]
    (document,) = make((context, "\nwind", "x"), task=task, tokenizer=byte_pairs, page_size=1)
    assert len(document.prefix) == num_common


@given(
    max_prompt_tokens=st.integers(14, 90),
    num_question_words=st.lists(st.integers(1, 9), min_size=1, max_size=3),
)
def test_the_cut_is_in_the_context_and_the_same_for_all_questions(
    max_prompt_tokens, num_question_words
):
    task = Task(name="t", template="<bos> w4 {context} w5 {input}", metric=Metric.F1, max_new=4)
    context = list(range(20, 80))
    questions = [words(300 + 20 * i, count) for i, count in enumerate(num_question_words)]
    (document,) = make(
        *((" ".join(f"w{i}" for i in context), it, "w6") for it in questions),
        task=task,
        max_prompt_tokens=max_prompt_tokens,
        page_size=1,
    )
    longest = 3 + len(context) + max(num_question_words)
    for text, question in zip(questions, document.questions, strict=True):
        prompt = [*document.prefix, *question.suffix]
        asked = [int(word[1:]) for word in text.split()]
        rest = prompt[2 : -len(asked) - 1]
        num_cut = len(context) - len(rest)
        num_start = next((i for i, it in enumerate(rest) if it != context[i]), len(rest))
        assert prompt == [1, 4, *rest, 5, *asked]
        assert rest == context[:num_start] + context[num_start + num_cut :]
        assert num_cut == max(0, longest - max_prompt_tokens)
        if len(asked) == max(num_question_words) and num_cut:
            _assert_cut_as_longbench_does(prompt, [1, 4, *context, 5, *asked], max_prompt_tokens)


def _assert_cut_as_longbench_does(prompt, whole, max_prompt_tokens):
    """Check that the prompt is the first and the last half of the tokens that fit, unless this
    would cut into the question."""
    half = max_prompt_tokens // 2
    assert len(prompt) == max_prompt_tokens
    if max_prompt_tokens - half > len(whole) - 62:
        assert prompt == whole[:half] + whole[-(max_prompt_tokens - half) :]


def test_a_long_opening_is_never_cut():
    task = Task(name="t", template=f"{words(4, 9)} {{context}}", metric=Metric.F1, max_new=4)
    (document,) = make((words(20, 9), "", "w6"), task=task, max_prompt_tokens=12, page_size=1)
    assert [*document.prefix, *document.questions[0].suffix] == [*range(4, 13), 26, 27, 28]


def test_a_limit_that_leaves_no_context_is_named():
    with pytest.raises(RecordError, match=r"words\.jsonl:1: .* 4 tokens beside .*_tokens 2; raise"):
        make((words(10, 8), "w4 w5 w6", "w5"), max_prompt_tokens=2)


CHATML = (
    "{{ bos_token }}{% if messages[0]['role'] != 'system' %}<|system|>\nBe brief.</s>\n{% endif %}"
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] | trim }}</s>\n"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


@pytest.fixture
def chatting(byte_pairs):
    """Return the same tokenizer with a template that writes <s> itself, greets, and trims
    messages."""
    byte_pairs.chat_template = CHATML
    yield byte_pairs
    byte_pairs.chat_template = None


@pytest.mark.parametrize("name", ["hotpotqa", "multi_news", "gsm8k"])
def test_prompts_of_a_chat_are_the_templates_own_of_one_message(chatting, name):
    task = TaskOptions(chat=True).task_for(name)
    context, questions = "\nsun rain wind rain.\n\n" * 4, ["Which rain?", "\n\nWhich sun?"]
    (document,) = make(*((context, it, "rain") for it in questions), task=task, tokenizer=chatting)
    for text, question in zip(questions, document.questions, strict=True):
        message = {"role": "user", "content": task.prompt(context, text)}
        expected = chatting.apply_chat_template(
            [message], add_generation_prompt=True, return_dict=False
        )
        assert [*document.prefix, *question.suffix] == expected
        assert expected.count(chatting.bos_token_id) == 1
        assert chatting.decode(question.draft) == "rain</s>"
    shared = chatting.decode(document.prefix)
    assert shared.startswith("<s><|system|>\nBe brief.</s>\n<|user|>\n") and shared[-30:] in context


def test_a_cut_of_a_chat_is_in_the_context(chatting):
    task = Task(
        name="t", template="rain: {context} {input}", metric=Metric.F1, max_new=4, chat=True
    )
    context = " ".join(f"wind{i}" for i in range(40))
    (whole,) = make((context, "sun", "x"), task=task, tokenizer=chatting, page_size=1)
    (short,) = make(
        (context, "sun", "x"), task=task, tokenizer=chatting, page_size=1, max_prompt_tokens=96
    )
    asked = [[*it.prefix, *it.questions[0].suffix] for it in (whole, short)]
    assert len(asked[1]) == 96 < len(asked[0])
    texts = [chatting.decode(it) for it in asked]
    for start in ("<s><|system|>\nBe brief.</s>\n<|user|>\nrain: wind0 wind1 ",):
        assert all(text.startswith(start) for text in texts)
    assert all(text.endswith("wind39 sun</s>\n<|assistant|>\n") for text in texts)


def test_a_chat_needs_a_template_that_keeps_what_is_said(byte_pairs, chatting):
    task = Task(name="t", template="{context} {input}", metric=Metric.F1, max_new=4, chat=True)
    chatting.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(
        ConfigError, match=r"the chat template of .* cannot be used.*roles must alternate"
    ):
        make(("rain sun", "wind", "x"), task=task, tokenizer=chatting)
    chatting.chat_template = "{{ 'rain' + 1 }}"
    with pytest.raises(ConfigError, match=r"the chat template of .* cannot be used.*: \w"):
        make(("rain sun", "wind", "x"), task=task, tokenizer=chatting)
    chatting.chat_template = "{{ messages[0]['content'] | upper }}"
    with pytest.raises(ConfigError, match=r"changes the text of messages \(words\.jsonl:1\)"):
        make(("rain sun", "wind", "x"), task=task, tokenizer=chatting)
    chatting.chat_template = None
    with pytest.raises(ConfigError, match=r"the chat template of .*cannot be used"):
        make(("rain sun", "wind", "x"), task=task, tokenizer=chatting)


def make_many(num_contexts, task=WORDS):
    return make(*((words(4 + i, 8), "w4", "w5") for i in range(num_contexts)), task=task)


def test_a_split_is_by_context_and_deterministic():
    other = Task(name="other", template="{context} {input}", metric=Metric.F1, max_new=4)
    documents = make_many(30) + make_many(10, other)
    train, held_out = split_documents(documents, held_out_share=0.3, seed=1)
    assert [it.task for it in held_out].count(WORDS) == 9
    assert [it.task for it in held_out].count(other) == 3
    assert sorted(map(documents.index, train + held_out)) == list(range(40))
    assert [documents.index(it) for it in held_out] == sorted(map(documents.index, held_out))
    assert split_documents(documents, held_out_share=0.3, seed=1) == (train, held_out)
    assert split_documents(documents, held_out_share=0.3, seed=2) != (train, held_out)


def test_a_context_of_two_tasks_or_in_two_forms_is_on_one_side():
    other = Task(name="other", template="{context} {input}", metric=Metric.F1, max_new=4)
    documents = [*make_many(20), *make_many(24, other)]
    wide = [(words(4 + i, 8).replace(" ", "  "), "w4", "w5") for i in range(8)]
    documents += make(*wide)
    train, held_out = split_documents(documents, held_out_share=0.5, seed=0)
    assert not {it.context for it in train} & {it.context for it in held_out}
    assert len({it.context for it in held_out if it.task == WORDS}) == 10
    assert len([it for it in held_out if it.task == other]) == 12


@pytest.mark.parametrize(("share", "sizes"), [(0.01, (3, 1)), (0.99, (1, 3))])
def test_no_side_of_a_split_is_empty(share, sizes):
    train, held_out = split_documents(make_many(4), held_out_share=share, seed=0)
    assert (len(train), len(held_out)) == sizes


def test_a_split_that_cannot_be_is_refused():
    with pytest.raises(ConfigError, match="1 contexts of 1 tasks cannot be split"):
        split_documents(make_many(1), held_out_share=0.5, seed=0)


def test_each_split_has_the_digest_of_its_own_records():
    one = make_source(*((words(4 + i, 8), "w4", "w5") for i in range(4)), name="one.jsonl")
    two = make_source((words(90, 8), "w4", "w5"), name="two.jsonl")
    documents = make_documents([one, two], numbered_words(), page_size=4, max_prompt_tokens=None)
    (train,) = data_files([one, two], [documents[2], documents[0]])
    assert (train.name, train.num_questions) == ("one.jsonl", 2)
    used = [one.records[0].record, one.records[2].record]
    assert train.sha256 == records_sha256(used)
    assert [it.name for it in data_files([one, two], documents)] == ["one.jsonl", "two.jsonl"]
