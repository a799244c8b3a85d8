"""Offline work on pairs of models: which layers of a sender's KV a receiver can read unchanged.

    data      a data set ─► questions about documents, as tokens in whole pages
    compute   two checkpoints ─► their layers over any KV ─► what every plan answers, in a journal
    stats     what was measured ─► the frontier ─► the gate ─► a profile, or why there is none
    report    a profile for people
    costs     what a device takes; forecast and progress: how long a run will
    settings  what is to be profiled, and how
    profiler  all of it; `verification` measures a profile's plans again

    distill   an adapter that shares its base's KV, from a teacher or from answers

    evidence       what a profile holds beside what servers read
    adapters       a LoRA adapter merged into its base
    random_models  checkpoints of any shape

A folder imports from those above it. Nothing here imports sglang, and nothing runs in a server, but
for `environment`, which tells it what memory is free.
"""
