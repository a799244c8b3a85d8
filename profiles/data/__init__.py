"""Turn data sets and request logs into prompts, and measure the quality of answers.

records    lines of JSONL in LongBench's form
tasks      template, metric and length of the answer of each known data set
metrics    quality of an answer, 0 to 1
datasets   files, folders and hubs ─► records with their tasks
documents  records ─► tokens in whole pages, and the questions behind them
logs       a server's request log ─► documents
"""
