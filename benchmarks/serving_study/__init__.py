"""Serving under load: what reuse gives where requests wait for one another.

    python -m benchmarks.serving_study              all studies
    python -m benchmarks.serving_study --quick      the same on tiny models, in two minutes
    python -m benchmarks.serving_study --only s21   one of them

    studies    Poisson arrivals and bursts, and what each contender does alone
    streams    the sender's requests in the same stream, and a trace
    rig        real servers: a worker that holds what a sender has read, replicas with the extension
               and without
    arrivals   when requests come
    client     sends them
    measures   percentiles, goodput, and the queue that theory expects

Contenders get the same requests at the same times; but in S15b each has documents of its own, as
they have to be new. In S15 and S21 answers are compared with those of an idle server before times
are. Elsewhere outcomes are counted.
"""
