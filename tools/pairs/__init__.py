"""Small trained pairs: fine-tunes of one foundation, with documents to judge them on.

    words       the 512-word vocabulary
    documents   synthetic documents with questions, one writer per task
    questions   the LongBench-style JSONL files

47c4f66 has the recipe that trained them, `tools/pairs/train.py`.
"""
