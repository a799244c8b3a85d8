"""Make an adapter that shares exactly, from a teacher or from answers: `droidspeak distill`.

An activated LoRA (aLoRA) acts only behind its invocation. The text before the invocation is read by
the base, so the base's KV of the whole document is reused unchanged.

    settings  goal and recipe of a distillation
    prompts   data ─► questions about documents, each cut at its invocation
    forward   a document's KV, frozen, and many questions behind it as one tree
    student   the adapter: its first weights, its state on disk, its export
    training  the teacher's answers, and the steps
    judge     the student beside its teacher on held-out contexts, and the gate
    cli       the command
"""
