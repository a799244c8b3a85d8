"""Turn data sets into prompts: their files, their templates, and the quality of an answer.

records    lines of JSONL in LongBench's form
tasks      template, metric and length of the answer of each known data set
metrics    quality of an answer, 0 to 1
datasets   files, folders and hubs ─► records with their tasks
documents  records ─► tokens in whole pages, and the questions behind them
"""
