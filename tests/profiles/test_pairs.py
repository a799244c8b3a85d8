"""Pairs of models that can share KV, found among several models, and the reasons why others
cannot."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
from shipped import DATA, WEIGHTS

from cachetree import ConfigError
from profiles.data.logs import Asked, contexts_of
from profiles.many import file_of
from profiles.pairs import Entry, Wanted, pairs_of, read_entries, reads_of
from profiles.settings import Settings

BASE = WEIGHTS / "foundation"
ASKED = (str(DATA / "train.jsonl"),)
SETTINGS = Settings()


def of_base(*adapters: str, **rest: object) -> dict[str, Entry]:
    entries = {"base": Entry(model=str(BASE), data=ASKED)}
    for name in adapters:
        folder = str(WEIGHTS / name)
        entries[name] = Entry(model=str(BASE), adapter=folder, data=ASKED, **rest)
    return entries


def wanted(entries: dict[str, Entry], settings: Settings = SETTINGS, contexts=None) -> list[str]:
    return [it.name for it in pairs_of(entries, settings, contexts) if not it.why_not]


def reasons(entries: dict[str, Entry], settings: Settings = SETTINGS) -> dict[str, str]:
    return {it.name: it.why_not for it in pairs_of(entries, settings, None) if it.why_not}


def test_adapters_read_after_their_base_unless_something_says_otherwise():
    entries = of_base("receiver_lora", "tables_lora")
    assert wanted(entries) == ["base → receiver_lora", "base → tables_lora"]
    causes = reasons(entries)
    assert len(causes) == 4 and {it.split(":")[0] for it in causes.values()} == {
        "the sender is an adapter, and reads after its base"
    }
    named = {**entries, "tables_lora": replace_senders(entries["tables_lora"], "receiver_lora")}
    assert wanted(named) == ["base → receiver_lora", "receiver_lora → tables_lora"]
    assert reasons(named)["base → tables_lora"] == "its entry names other senders"


def replace_senders(entry: Entry, *senders: str) -> Entry:
    return Entry(model=entry.model, adapter=entry.adapter, data=entry.data, senders=senders)


def test_full_models_of_one_family_may_all_read_first_and_strangers_are_no_pair(tmp_path):
    entries = {it: Entry(model=str(WEIGHTS / it), data=ASKED) for it in ("sender", "receiver")}
    assert wanted(entries) == ["receiver → sender", "sender → receiver"]
    causes = reasons({**entries, "gone": Entry(model=str(tmp_path), data=ASKED)})
    assert len(causes) == 4 and str(tmp_path) in causes["gone → sender"]
    twin = reasons({**entries, "twin": entries["sender"]})
    assert "the same model" in twin["sender → twin"] == twin["twin → sender"]


def test_an_activated_adapter_needs_no_profile():
    causes = reasons(of_base("sender_alora"))
    assert set(causes) == {"base → sender_alora", "sender_alora → base"}
    assert all("is an activated adapter" in it for it in causes.values())


def test_a_receiver_without_data_has_no_profile():
    entries = {**of_base(), "bare": Entry(model=str(BASE), adapter=str(WEIGHTS / "tables_lora"))}
    assert reasons(entries)["base → bare"].startswith("nothing to ask the receiver")
    assert wanted(entries, replace(SETTINGS, data=ASKED)) == ["base → bare"]


def asked(*lines: tuple[str, str]) -> list[Asked]:
    return [
        Asked(ids=tuple(map(ord, text)), model=model, place="", number=number)
        for number, (model, text) in enumerate(lines)
    ]


DOCUMENTS = {letter: letter * 40 for letter in "abcd"}
LOG = contexts_of(
    asked(
        ("base", DOCUMENTS["a"] + "sum"),
        ("tables_lora", DOCUMENTS["a"] + "row"),
        ("tables_lora", DOCUMENTS["a"] + "col"),
        ("receiver_lora", DOCUMENTS["a"] + "who"),
        ("tables_lora", DOCUMENTS["b"] + "row"),
        ("receiver_lora", DOCUMENTS["b"] + "who"),
        ("base", DOCUMENTS["c"] + "sum"),
    ),
    page_size=4,
)


def test_a_log_says_who_read_first_and_how_much_others_shared():
    assert reads_of(LOG) == {
        ("base", "tables_lora"): (2, 80),
        ("base", "receiver_lora"): (1, 40),
        ("tables_lora", "receiver_lora"): (1, 40),
    }


def test_pairs_of_a_log_come_by_the_tokens_that_they_share():
    entries = of_base("receiver_lora", "tables_lora")
    names = wanted(entries, SETTINGS, LOG)
    assert names[0] == "base → tables_lora" and set(names[1:]) == {
        "base → receiver_lora",
        "tables_lora → receiver_lora",
    }


def test_a_folder_of_adapters_and_a_models_file_name_the_same(tmp_path):
    folder = tmp_path / "adapters"
    shutil.copytree(WEIGHTS / "tables_lora", folder / "tables")
    for name in ("tables", "base"):
        shutil.copy(DATA / "train.jsonl", folder / f"{name}.jsonl")
    entries = read_entries(replace(SETTINGS, adapters=folder, base=BASE))
    models = tmp_path / "models.yaml"
    models.write_text(
        f"base: {{model: {BASE}, data: [adapters/base.jsonl]}}\n"
        f"tables: {{model: {BASE}, adapter: adapters/tables, data: [adapters/tables.jsonl]}}\n"
    )
    assert read_entries(replace(SETTINGS, models=models)) == entries
    assert list(entries) == ["base", "tables"]


def test_files_of_all_kinds_of_data_are_beside_the_models_file(tmp_path):
    (tmp_path / "a.jsonl").touch()
    data = "[a.jsonl, 'log:a.jsonl', 'gsm8k:a.jsonl', gsm8k, 'longbench:trec', 'log:/a.jsonl']"
    path = tmp_path / "models.yaml"
    path.write_text(f"a: {{model: x, data: {data}}}\nb: {{model: x}}\n")
    beside, *rest = f"{tmp_path}/a.jsonl", "gsm8k", "longbench:trec", "log:/a.jsonl"
    expected = (beside, f"log:{beside}", f"gsm8k:{beside}", *rest)
    assert read_entries(replace(SETTINGS, models=path))["a"].data == expected


def test_a_profile_is_in_the_folder_whatever_its_models_are_called():
    for sender, name in (("org/b", "org_b"), ("../a", "_a"), ("/etc/a", "_etc_a"), ("..", "")):
        assert file_of(Wanted(sender=sender, receiver="c")) == f"{name}_to_c.json"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: {model: x}\n", "names fewer than two models"),
        ("a: {model: x}\nb: {modle: x}\n", "there is no key modle; did you mean model?"),
        ("a: {model: x}\nb: {adapter: x}\n", "b: Object missing required field `model`"),
        ("{", "is not YAML"),
        (
            "a: {model: x}\nb: {model: x, metric: rouge}\n",
            "b: metric is rouge; it has to be f1 or rouge_l or ",
        ),
        (
            "a: {model: x}\nb: {model: x, senders: [a, base]}\n",
            "b: senders has base, which is no model of the file; it has a, b",
        ),
    ],
)
def test_a_models_file_that_cannot_be_used_is_named(tmp_path, text, says):
    path = tmp_path / "models.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_entries(replace(SETTINGS, models=path))
    assert says in str(caught.value) and str(path) in str(caught.value)


def test_a_folder_without_base_or_adapters_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="without --base"):
        read_entries(replace(SETTINGS, adapters=tmp_path))
    with pytest.raises(ConfigError, match=r"has no folder with an adapter_config\.json"):
        read_entries(replace(SETTINGS, adapters=tmp_path, base=BASE))
