"""Small trained pairs: fine-tunes of one foundation, with documents to judge them on.

    words       the 512-word vocabulary
    documents   synthetic documents with questions, one writer per task
    questions   the LongBench-style JSONL files
    train       the recipe: each fine-tune as a frozen value, and its training

`python -m tools.pairs.train` trains and exports them all.
"""
