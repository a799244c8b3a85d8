"""What one request goes through, from SGLang's queue to its answer: the phases of a `Request`.

    seen       queue      every request that waits, in SGLang's order
               waiting    asks tiers that do not advertise; may wait for one that computes the
                          same pages right now (followers)
    planned    planner    whose KV, how many tokens, which layers are computed anew
    fetching   source     staged in host memory, or in this server's own pool
    arriving   arrivals   E is there, and the rest should be before the recompute is over: no more
                          hidden, unless its full prefill would take others more than one step
    ready                 everything is there. Too late, or not worth it any more: a full prefill
    loading    load       SGLang has slots: a thread copies layer after layer of the source into
                          them
               forward    partial_prefill computes the others, and what has not come
                          in time is prefilled in full; then SGLang's own forward runs
    settled    report     what it has read is noted (meta_info), and told once, with its answer
               replies    which may wait until others can read what it has left

`request` says what follows on what; `waiting` has all that are in SGLang's queue. The scheduler
thread does all of it but for the copies. `controls` is what a request may ask for. On several ranks
the first decides, and a request is as far as it is on the last of them.
"""
