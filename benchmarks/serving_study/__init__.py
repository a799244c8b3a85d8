"""Serving under load: what reuse gives where requests wait for one another.

    python -m benchmarks.serving_study              all studies, and their pictures
    python -m benchmarks.serving_study --quick      the same on tiny models, in a minute
    python -m benchmarks.serving_study --draw       the pictures alone, from what is kept

    studies    those of requests for documents, and what each compares
    agents     that of two agents which call one another
    rig        real servers: a worker that holds what a sender has read, replicas with the extension
               and without
    arrivals   when requests come
    client     sends them
    measures   percentiles, goodput, and the queue that theory expects
    pictures   of what is in `benchmarks/results/serving_study`

Every contender gets the same requests at the same times. Their answers are compared with those of
an idle server before their times are.
"""
