"""The drift guard: watch in service how far approximate KV moves answers, and stop bad plans.

shadows    compare answers with an exact run afterwards. They run on the event loop of SGLang's
           TokenizerManager, and send ordinary requests to the scheduler.
plans      distances, the evidence that they add up to, and the plans of a pair in service. Pure.
service    the scheduler's half: take plans out of service, and keep the record.
"""
