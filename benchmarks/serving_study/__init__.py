"""Serving under load: what reuse gives where requests wait for one another.

    python -m benchmarks.serving_study              all studies, and their pictures
    python -m benchmarks.serving_study --quick      the same on tiny models, in two minutes
    python -m benchmarks.serving_study --only s21   one of them
    python -m benchmarks.serving_study --draw       the pictures alone, from what is kept

    studies    Poisson arrivals and bursts, and what each contender does alone
    streams    the sender's requests in the same stream, and a trace
    links      two receivers on one link, links of every rate, short documents
    agents     two agents which call one another
    quality    quality against delay
    witness    one point by other clients
    rig        real servers: a worker that holds what a sender has read, replicas with the extension
               and without
    arrivals   when requests come
    client     sends them
    measures   percentiles, goodput, and the queue that theory expects
    pictures   of what is in `benchmarks/results/serving_study`

Every contender gets the same requests at the same times. Their answers are compared with those of
an idle server before their times are.
"""
