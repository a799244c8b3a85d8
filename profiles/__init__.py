"""Offline work on pairs of models: which layers of a sender's KV a receiver can read unchanged.

    data set ─► records ─► tasks ─► documents            text, then tokens in whole pages
    two checkpoints ─► models ─► layered                 any span of layers, over any KV
    passes ─► mixtures ─► examination ─► study           one document, step by step, in a journal
    training ─► frontier ─► judging ─► gate ─► artifact  a profile, or why there is none
    costs, forecast, progress                            what a device takes, and how long a run

    profiler      all of it; `verification` judges a profile on other data
    report        a profile for people
    oracle        partial prefill with plain transformers: slow, obvious, the reference for tests

Nothing here imports sglang, and nothing here runs inside a server.
"""
