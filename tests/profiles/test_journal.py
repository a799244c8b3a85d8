"""Measurements of a run survive a kill at any byte."""

import hashlib
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from shipped import DATA, SHIPPED
from test_room import make_document

from cachetree import ConfigError
from profiles.compute.fitting import NUM_FITTED
from profiles.compute.journal import Entry, Journal
from profiles.compute.models import load_tokenizer
from profiles.data.datasets import load_sources
from profiles.data.documents import in_drawn_order, key_of, make_documents
from profiles.data.records import write_records
from profiles.profiler import _making, in_judged_order, open_journal
from profiles.settings import Settings
from profiles.splits import hardly_enough, load_documents, load_fitted_on, load_splits
from profiles.stats.artifact import Data
from profiles.stats.measured import Score
from tools.pairs.questions import OPTIONS, make_records

SCORE = Score(kl=0.1, tv=0.2, quality=None)


def entry(document: str, step: str, passes: int = 1, split: str = "train") -> Entry:
    return Entry(
        split=split,
        document=document,
        step=step,
        passes=passes,
        seconds=0.5,
        answers=((1, 2),),
        scores=((SCORE,),),
    )


def written(path: Path, entries: list[Entry]) -> bytes:
    journal = Journal(path)
    for entry in entries:
        journal.put(entry)
    journal.close()
    return path.read_bytes()


def test_every_cut_keeps_the_whole_lines_before_it(tmp_path):
    path = tmp_path / "journal"
    entries = [entry("0", "references", 2), entry("0", "start:1"), entry("1", "references", 2)]
    content = written(path, entries)
    ends = [i + 1 for i, byte in enumerate(content) if byte == ord("\n")]
    for length in range(len(content) + 1):
        path.write_bytes(content[:length])
        journal = Journal(path)
        num_whole = sum(end <= length for end in ends)
        read = [journal.get(it.split, it.document, it.step) for it in entries]
        assert read == [*entries[:num_whole], *[None] * (3 - num_whole)]
        journal.put(entry("7", "start:9"))
        journal.close()
        assert Journal(path).get("train", "7", "start:9") == entry("7", "start:9")


def test_passes_and_seconds_add_up(tmp_path):
    path = tmp_path / "folder" / "journal"
    entries = [entry("0", "references", 2), entry("0", "start:1", 3), entry("1", "references", 2)]
    written(path, [*entries, entry("1", "start:1"), entry("0", "x", 9, "held_out")])
    journal = Journal(path)
    assert journal.num_passes == 17
    assert journal.seconds == 2.5


def test_a_finished_run_leaves_nothing(tmp_path):
    journal = Journal(tmp_path / "journal")
    journal.put(entry("0", "references"))
    journal.remove()
    assert list(tmp_path.iterdir()) == []


def test_a_second_run_beside_the_first_is_refused(tmp_path):
    first = Journal(tmp_path / "journal")
    first.put(entry("0", "references"))
    with pytest.raises(ConfigError, match="already runs in another process"):
        Journal(tmp_path / "journal")
    first.close()
    assert Journal(tmp_path / "journal").get("train", "0", "references") is not None


def test_scores_whose_fields_were_others_are_not_read(tmp_path):
    """These scores are of the same run, from before the layout was in a journal's name."""
    out, run = tmp_path / "pair.json", ("models", "documents")
    name = hashlib.sha256(msgspec.json.encode(run)).hexdigest()[:12]
    before = tmp_path / f".{out.name}.{name}.jsonl"
    line = msgspec.to_builtins(entry("0", "references"))
    line["scores"] = [[[0.1, 1.0, 0.2, None, 0.3]]]
    before.write_bytes(msgspec.json.encode(line) + b"\n")
    assert Journal(before).get("train", "0", "references") is not None, "it would be read"
    assert Journal.beside(out, *run).get("train", "0", "references") is None


def test_prompts_are_no_longer_than_the_model_takes_whatever_is_asked_for():
    tokenizer = load_tokenizer(SHIPPED[0].receiver)
    settings = Settings(max_prompt_tokens=10_000, page_size=8, **asdict(OPTIONS))
    _, documents = load_documents(settings, [str(DATA / "train.jsonl")], tokenizer, 100)
    prompts = [len(it.prefix) + len(at.suffix) for it in documents for at in it.questions]
    assert max(prompts) == 100 - OPTIONS.max_new


def test_maps_are_fitted_on_some_contexts_of_what_is_named(tmp_path):
    """The other contexts need not fit into memory, and stay unused."""
    write_records(make_records("more", 5, NUM_FITTED + 1), tmp_path / "more.jsonl")
    tokenizer = load_tokenizer(SHIPPED[0].receiver)
    named = {"fit_data": (str(tmp_path / "more.jsonl"),), "e_correction": True}
    settings, none = Settings(**named, **asdict(OPTIONS)), Data(files=(), documents=[])
    fitted_on = load_fitted_on(settings, none, none, tokenizer, 512)
    assert len(fitted_on) == NUM_FITTED
    _, documents = load_documents(settings, settings.fit_data, tokenizer, 512)
    assert fitted_on != documents[:NUM_FITTED], "of a sorted file the first are the shortest"


def test_data_without_a_name_are_called_the_data():
    """The records of a user's own JSONL name no data set."""
    tokenizer = load_tokenizer(SHIPPED[0].receiver)
    settings = Settings(data=(str(DATA / "train.jsonl"),), **asdict(OPTIONS))
    _, held_out = load_splits(settings, tokenizer, 512)
    unnamed = [replace(it, task=replace(it.task, name="")) for it in held_out.documents]
    (line,) = hardly_enough(replace(held_out, documents=unnamed), 0.05)
    assert line.startswith("12 held-out contexts of the data are hardly enough")


def test_the_seed_draws_the_contexts_that_come_first():
    """The sweep, baselines and maps use the first contexts. A journal is named by the order of the
    contexts."""
    tokenizer = load_tokenizer(SHIPPED[0].receiver)
    settings = Settings(data=(str(DATA / "train.jsonl"),), **asdict(OPTIONS))
    _, documents = load_documents(settings, settings.data, tokenizer, 512)
    in_file = [it.context for it in documents]

    def splits(seed):
        drawn = load_splits(replace(settings, seed=seed), tokenizer, 512)
        return [[it.context for it in split.documents] for split in drawn]

    assert all(it != sorted(it, key=in_file.index) for it in splits(0))
    assert splits(0) == splits(0) != splits(1)


def test_other_contexts_beside_them_change_no_drawn_order():
    documents = [replace(make_document(32, 1), context=str(it)) for it in range(20)]
    ordered = in_drawn_order(documents, 0)
    assert in_drawn_order(documents[5:], 0) == [it for it in ordered if it in documents[5:]]
    assert in_drawn_order(documents, 1) != ordered != documents


def test_contexts_that_an_earlier_run_has_judged_come_first_and_in_its_order(tmp_path):
    documents = [replace(make_document(32, 1), context=str(it), opening=it) for it in range(6)]
    journal = Journal(tmp_path / "journal")
    for place in (4, 2):
        journal.put(entry(key_of(documents[place]), "references", split="held_out"))
    journal.put(entry(key_of(documents[5]), "references", split="train"))
    most = Settings(most_contexts=4)
    drawn = in_judged_order(documents, journal, most)
    assert [it.context for it in drawn] == ["4", "2", "0", "1"]
    journal.close()


def test_journal_knows_a_document_by_all_that_is_asked():
    one = make_document(32, 2)
    fewer = replace(one, questions=one.questions[:1])
    shorter = replace(one, prefix=one.prefix[:16])
    assert len({*map(key_of, (one, replace(one), fewer, shorter))}) == 3


def test_the_hardware_is_what_was_run_on(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda at: f"GPU of {at}")
    journal = Journal(tmp_path / "journal")
    rest = {"elapsed_s": 1.0, "sweep_passes": 1, "fitted": ()}
    made = _making(Settings(device="cpu"), journal, 1, **rest)
    assert "cores" in made.hardware and made.device == "cpu"
    assert _making(Settings(), journal, 1, **rest).hardware == "GPU of cuda"


def test_another_way_to_ask_has_another_journal(tmp_path):
    """An example is a calibration that continues with prompts cut at another length."""
    tokenizer = load_tokenizer(SHIPPED[0].receiver)
    settings = Settings(out=tmp_path / "pair.json")
    sources = load_sources([str(DATA / "train.jsonl")], OPTIONS)
    for page_size, most in ((16, None), (16, None), (32, None), (16, 64)):
        documents = make_documents(sources, tokenizer, page_size=page_size, max_prompt_tokens=most)
        open_journal(settings, (), "models", documents).close()
    assert len(list(tmp_path.iterdir())) == 3


def test_a_run_that_goes_on_on_another_device_measures_and_times_anew(tmp_path, monkeypatch):
    """If no setting names a device, the device is the GPU if there is one."""
    for has_gpu in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda has_gpu=has_gpu: has_gpu)
        open_journal(Settings(out=tmp_path / "pair.json"), (), "models").close()
    assert len(list(tmp_path.iterdir())) == 2


def test_answers_that_end_elsewhere_have_another_journal(tmp_path):
    """The end tokens may be in `generation_config.json`, which is not a part of a model's
    identity."""
    settings = Settings(out=tmp_path / "pair.json")
    for ends in ({2, 5}, {5, 2}, {2}):
        answerer = SimpleNamespace(ends=frozenset(ends))
        open_journal(settings, (answerer, answerer), "models").close()
    assert len(list(tmp_path.iterdir())) == 2
