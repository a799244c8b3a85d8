"""Requests to two running servers that show whether reuse works: `droidspeak verify`.

    prompts ─► sender reads ─► receiver answers ─► checks ─► lines
                               receiver answers by full prefill ─┘

Every request carries a salt of its own, so that no other request's cache is read or filled.
"""
