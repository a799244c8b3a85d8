"""What approximate KV does to answers, seen while the server answers: in its front end.

exact      this server's own exact run of a prompt and the tokens that were served after it
distance   how far what was served is from what an exact run says. Pure
detector   has the mean of what is observed risen above what is allowed? Pure

It runs on the event loop of SGLang's TokenizerManager and asks the scheduler as everybody does.
"""
