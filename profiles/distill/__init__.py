"""An adapter that shares exactly, made from a teacher or from answers: `droidspeak distill`.

An activated LoRA (aLoRA) acts from its invocation on. What precedes the invocation is the base's,
so the base's KV of the whole document is reused as it is.

    settings  what is to be made, and how
    prompts   data ─► questions about documents, each cut at its invocation
    forward   a document's KV, frozen, and many questions behind it as one tree
    student   the adapter: how it begins, what of it is kept, what is exported
    training  the teacher's answers, and the steps
    judge     the student beside its teacher on held-out contexts, and the gate
    cli       the command
"""
