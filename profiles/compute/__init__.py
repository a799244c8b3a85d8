"""Run two models over documents: any layers over any KV, step by step, with results in a journal.

models       loads two checkpoints
quantised    reads AWQ, GPTQ and FP8 matrices
layered      runs any span of a model's layers, over any KV
mixtures     answers questions while each layer reads KV from a source of its own
examination  measures how close the answers stay to full prefill's
room         sizes the batches so that they fit into memory
journal      keeps the results of measured steps on disk
study        measures one document: its KV, its E and its questions
measuring    measures every block by KL, any plan by the metric
fitting      fits maps that correct E
"""
