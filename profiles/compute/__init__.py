"""Run two models over documents, with any layers over any KV, step by step, in a journal.

models       loads two checkpoints; quantised: reads AWQ, GPTQ and FP8 matrices
layered      runs any span of a model's layers, over any KV
mixtures     answers questions if each layer reads its own source
examination  measures how close the answers stay to full prefill's
room         sizes the batches so that they fit into memory
study        measures one document: its KV, its E and its questions; fills the journal
measuring    measures every block by KL, any plan by the metric
fitting      fits maps of E
"""
