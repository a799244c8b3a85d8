"""The life of one request, from SGLang's queue to its answer.

Rules
-----

SGLang decides which request runs next. This package hides a request while its fetch runs, and loads
its pages once SGLang has given it KV slots. Each request has one `Request`, which is in one phase.
Only `Request.reach` changes the phase. It raises IllegalTransition for a phase that cannot follow.

A failed peer, fetch or copy ends in a full prefill, not in an error. Each request is reported once,
with the reason.

The scheduler thread does everything here, except the copies into KV slots, which `load` makes in a
thread. Transport threads fill host memory. While requests are in the queue, the scheduler thread
only looks at this memory. A batch's forward may wait for late layers, for a bounded time.

On several ranks the first rank decides and sends its decisions to the others. A request is in the
lowest phase that any rank has reached. So all ranks show SGLang the same queue.

From arrival to report
----------------------

phase      file            what happens
seen       queue           Before SGLang builds a batch, `queue` shows all waiting requests to
                           `waiting`, in SGLang's order.
           waiting         Ask a HiCache backend for pages. SGLang does not see the request yet.
           followers       Perhaps wait for another request that computes the same pages now.
planned    planner         Choose the sender, the number of tokens, and the layers to recompute. If
                           there is no plan, the request is settled with an outcome that says why.
                           If staging memory is used up, SGLang may prefill the request in full.
fetching   source          Pages arrive in host memory. SGLang does not see the request. Pages in
                           this server's own pool need no fetch.
arriving   arrivals        All E is here, and the rest should arrive during the recompute. SGLang
                           sees the request, unless its full prefill would delay requests that
                           decode by more than one scheduler step.
ready      arrivals        All pages are here. Check once more that reuse still saves time.
loading    load            SGLang has given KV slots. A thread copies layer after layer into them.
           forward         `partial_prefill` recomputes the plan's block over the prefix. If a layer
                           did not arrive, the prefix is prefilled in full. Then SGLang's own
                           forward computes the new tokens.
settled    report          Note what the request has read (`meta_info`). Report it once, with its
                           first output: to the client, the log, the metrics and the trace.
           replies         If the request asked for it, hold back the end of its answer until peers
                           can read its KV.

`controls` parses what a request may ask for; `outcomes` explains each outcome; `answers` answers an
operator. `heads` recognises first pages that many prompts share.

How a wait ends
---------------

The wait counts from the first scheduler step that could have taken the request. A fetch may end
later than predicted, by at most the time that reuse should save (`cachetree.planning.Patience`). If
it exceeds this limit, or will at its rate, the request does a full prefill. So a slow peer costs at
most as much time as a full prefill.

A request can go back in four cases:

- The fetch of an `arriving` request gets slower: the request is `fetching` again.
- Another rank has no staging memory: this rank releases its own, and the request is `planned`.
- SGLang takes the slots back before the batch starts: the request is `seen` again.
- The device evicts pages that the plan continues from: the request is `seen` again. If it was
  still waiting, its wait does not restart.

Why not otherwise
-----------------

Why hide a request instead of blocking? A blocked scheduler step would delay all other requests.

Why not let SGLang run the request and load later? Its slots would stay locked during the fetch, and
a slow peer could fill the KV pool with requests that compute nothing.

Why recompute before SGLang's forward and not inside it? CUDA graphs, LoRA, chunking and logits of
that forward stay SGLang's. Attention is causal, so both give the same KV.

Why decide on the first rank? Ranks see the end of a fetch at different times. If each rank decided
for itself, they would build different batches, and the server would hang.

What could be better
--------------------

A request is planned once, although another peer may advertise more of its pages later.

A batch waits for the slowest load of its requests.

A request that waits for pages that another request computes waits for all of them, although it
could read the first of them earlier.
"""
