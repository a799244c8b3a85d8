"""Small trained pairs: a foundation and its fine-tunes, with documents to judge them on.

    words       the 512-word vocabulary
    documents   synthetic documents with questions, one writer per task
    rows        packed training rows made of documents, and the copying exercises
    model       a small Llama with fresh weights; folders of checkpoints and adapters
    wiring      initial attention heads that look at fixed distances
    stages      the recipe: one frozen config per stage
    train       one stage, from its start to its gates, resumable
    questions   the LongBench-style JSONL files
    check       whether a pair shows the effect that it was trained for

`python -m tools.pairs` trains and exports them all.
"""
