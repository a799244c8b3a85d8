"""Serving under load: how much reuse gains if requests wait for one another.

    python -m benchmarks.serving_study              all studies
    python -m benchmarks.serving_study --quick      the same on tiny models, in two minutes
    python -m benchmarks.serving_study --only s21   one of them

    studies    S15 (Poisson arrivals), S21 (bursts), and each contender on an idle server
    streams    S15b (the sender's requests come in the same stream), and a trace
    rig        real servers: a worker that holds the sender's documents, replicas with the extension
               and without
    arrivals   times of requests
    client     sends the requests
    measures   percentiles, goodput, and the mean wait that theory expects

Contenders get the same requests at the same times. Only in S15b each has its own documents, because
they must be new. S15 and S21 report the share of answers that equal an idle server's. All studies
count outcomes.
"""
