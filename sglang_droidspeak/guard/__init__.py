"""What approximate KV does to answers, seen while the server answers: in its front end.

shadows    the drift guard: answers compared with an exact run afterwards
plans      how far answers are from exact runs, the evidence in that, and which plans of a pair are
           in service. Pure
service    the drift guard's half in the scheduler: plans out of service, and their record

All but the last run on the event loop of SGLang's TokenizerManager and ask the scheduler as
everybody does.
"""
