import gzip
import hashlib
import json

import pytest
from shipped import by_context, prompt_of

from profiles.data import records as module
from profiles.data.records import Record, RecordError, read_records, records_sha256, write_records

LINE = (
    b'{"input":"question : where lives fimek ?","context":"fimek lives in nimefo .",'
    b'"answers":["nimefo"],"length":5,"dataset":"d","language":"en","all_classes":null,"_id":"7"}\n'
)


def test_a_longbench_line_is_read_and_written_back(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(LINE * 2)
    records = read_records(path)
    assert records[0].id == "7"
    assert records[0].answers == ("nimefo",)
    write_records(records, path)
    assert path.read_bytes() == LINE * 2
    assert records_sha256(records) == hashlib.sha256(LINE * 2).hexdigest()


def test_unknown_fields_are_ignored_and_missing_ones_are_not(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(LINE + LINE.replace(b'"_id"', b'"extra":1,"_id"'))
    assert len(read_records(path)) == 2
    path.write_bytes(LINE + LINE.replace(b'"input"', b'"query"'))
    with pytest.raises(RecordError, match=r"data\.jsonl:2 .*input"):
        read_records(path)


def test_descriptive_fields_of_a_record_may_be_missing(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"input":"?","context":"c","answers":["a"]}')
    assert read_records(path) == [Record(input="?", context="c", answers=("a",))]


def test_blank_lines_are_no_records_and_still_count_as_lines(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(LINE.replace(b"\n", b"\r\n") + b"\n  \n" + LINE + b"\n")
    assert len(read_records(path)) == 2
    path.write_bytes(LINE + b"\n{")
    with pytest.raises(RecordError, match=r"data\.jsonl:3 is not"):
        read_records(path)


def test_a_byte_order_mark_is_skipped(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + LINE * 2)
    assert [it.id for it in read_records(path)] == ["7", "7"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(LINE), "is gzip; unpack it"),
        (b"PK\x03\x04", "is a zip file; unpack it"),
        (b"PAR1", "is Parquet; write its rows as JSONL"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS pointer; .*`git lfs pull`"),
        (b"\n<!DOCTYPE html><html>", "is an HTML page; download the file itself"),
        (b"<html lang='en'>", "is an HTML page"),
        (LINE.decode().encode("utf-16"), "is UTF-16; save it as UTF-8"),
        (LINE.decode().encode("utf-16-le"), "is UTF-16"),
        (b"[" + LINE.strip() + b"]", r"is one JSON array; .*`jq -c '\.\[\]' "),
        (b" [\n" + LINE + b"]", "is one JSON array"),
        (json.dumps(json.loads(LINE), indent=1).encode(), "several lines; .*`jq -c . "),
    ],
)
def test_a_file_of_another_format_is_named_with_the_remedy(tmp_path, content, message):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=rf"^data file .*data\.jsonl .*{message}"):
        read_records(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no records"),
        (b"\n", "no records"),
        (b"{", ":1 is not"),
        (LINE + LINE.replace(b"fimek", b"\xff"), "(?i):2 is not.*utf-8"),
        (LINE + LINE.replace(b'"7"', b"[" * 100_000), ":2 is not"),
        (LINE + LINE.replace(b'["nimefo"]', b'"nimefo"'), r":2 is not.*answers"),
    ],
)
def test_useless_files_are_refused(tmp_path, content, message):
    path = tmp_path / "data.jsonl"
    path.write_bytes(content)
    with pytest.raises(RecordError, match=message):
        read_records(path)


def test_a_line_of_absurd_length_is_refused_before_it_is_decoded(tmp_path, monkeypatch):
    path = tmp_path / "data.jsonl"
    path.write_bytes(LINE + b"x" * len(LINE) + b"x")
    monkeypatch.setattr(module, "MAX_LINE_BYTES", len(LINE))
    with pytest.raises(RecordError, match=r"data\.jsonl:2 is longer than \d+ bytes"):
        read_records(path)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(RecordError, match="cannot be read"):
        read_records(tmp_path / "none.jsonl")


def make_record(context: str, question: str) -> Record:
    return Record(input=question, context=context, answers=("x",), id=question)


def test_consecutive_records_of_one_context_belong_together():
    records = [make_record(context, str(i)) for i, context in enumerate("aabab")]
    groups = [(context, [r.id for r in group]) for context, group in by_context(records)]
    assert groups == [("a", ["0", "1"]), ("b", ["2"]), ("a", ["3"]), ("b", ["4"])]


def test_the_prompt_begins_with_bos():
    assert prompt_of(make_record("rain and sun .", "question : ?")) == (
        "<bos> rain and sun . question : ?"
    )
