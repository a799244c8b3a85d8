"""Offline work on pairs of models: which layers of a sender's KV a receiver can read unchanged.

    metrics   quality of an answer (token F1)
    oracle    partial prefill with plain transformers: slow, obvious, the reference for every test
    sweep     every contiguous block of a pair -> a `cachetree.profile.PairProfile`
    pairs     the small trained pairs: their recipe, weights, documents and profile

Nothing here imports sglang, and nothing here runs inside a server.
"""
