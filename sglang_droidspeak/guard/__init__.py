"""What approximate KV does to answers, seen while the server answers: in its front end.

shadows    the drift guard: answers compared with an exact run afterwards
distance   how far what was served is from what an exact run says. Pure
detector   has the mean of what is observed risen above what is allowed? Pure
plans      which plans of a pair are in service, and what speaks against them. Pure
service    the drift guard's half in the scheduler: plans out of service (record)

All but the last run on the event loop of SGLang's TokenizerManager and ask the scheduler as
everybody does.
"""
