"""The drift guard: measure how far approximate KV changes served answers, and stop bad plans.

shadows    compare answers with exact prefills afterwards. They run on the event loop of SGLang's
           TokenizerManager, and send ordinary requests to the scheduler.
plans      the distance of an answer, the evidence against each plan, and alarms. Pure.
probation  evidence about an inherited plan. Pure.
service    the scheduler's half: take plans out of service, and keep the record.
"""
