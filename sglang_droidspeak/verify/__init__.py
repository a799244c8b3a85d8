"""`droidspeak verify`: send requests to two running servers, and check that reuse works.

    prompts ─► sender reads ─► receiver answers ─► checks ─► lines
                               receiver answers by full prefill ─┘

Every prompt has a salt of its own, so that checks neither read nor fill the cache of other
requests.
"""
