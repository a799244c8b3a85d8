"""Two models over documents: any layers over any KV, step by step, in a journal.

models       two checkpoints ─► models; quantised: the matrices of some of them
layered      any span of a model's layers, over any KV
mixtures     questions where each layer reads a source of its own
examination  how close the answers stay to full prefill's
room         batches that fit into the memory
study        one document: its KV and E, its questions, kept in the journal
measuring    every block by KL, any plan by the metric
fitting      maps of E
"""
