"""Data sets as prompts: where they come from, how they are asked and judged.

records    lines of JSONL in LongBench's form
tasks      template, metric and length of the answer of each known data set
metrics    quality of an answer, 0 to 1
datasets   files, folders and hubs ─► records with their tasks
documents  records ─► tokens in whole pages, and what follows them
"""

from profiles.data.datasets import Source, SourcedRecord, load_sources
from profiles.data.documents import Document, Question, data_files, make_documents, split_documents
from profiles.data.metrics import Metric
from profiles.data.records import Record, RecordError, read_records, write_records
from profiles.data.tasks import Task, TaskOptions, score

__all__ = [
    "Document",
    "Metric",
    "Question",
    "Record",
    "RecordError",
    "Source",
    "SourcedRecord",
    "Task",
    "TaskOptions",
    "data_files",
    "load_sources",
    "make_documents",
    "read_records",
    "score",
    "split_documents",
    "write_records",
]
