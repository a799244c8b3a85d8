"""Measure pairs of models offline: which layers of a sender's KV can a receiver read unchanged?

    data      a data set ─► questions about documents, as tokens in whole pages
    compute   two checkpoints ─► their layers over any KV ─► every plan's answers, in a journal
    stats     measurements ─► plans worth trying ─► the gate ─► a profile with the verdict
    report    a profile for people
    costs     times of a device; forecast and progress: how long a run will take
    settings  what to profile, and how
    profiler  runs all of it; `verification` measures a profile's plans again
    many      profiles all useful pairs of several models; `pairs` finds out which are useful

    distill   trains an adapter that reads its base's KV without loss

    evidence       fields of a profile that servers do not read
    adapters       merges a LoRA adapter into its base
    random_models  makes checkpoints of any shape

A folder imports only from folders above it in this list. Nothing here imports sglang. Servers use
only `environment`, which says how much memory is free.
"""
