"""Small trained pairs: fine-tunes of one foundation, with documents to judge them on.

    words       the 512-word vocabulary
    documents   synthetic documents with questions, one writer per task
    questions   the LongBench-style JSONL files

The pairs were trained by `tools/pairs/train.py`, which commit 47c4f66 still has.
"""
