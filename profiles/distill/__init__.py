"""Train an adapter that reads its base's KV without loss: `droidspeak distill`.

An activated LoRA (aLoRA) acts only from its invocation on, a known run of tokens behind the
document. The base reads the document, so a server reuses the base's KV unchanged. The adapter
learns from a teacher's answers, or from right answers in the data.

    settings  goal and recipe of a distillation
    prompts   data ─► questions about documents, each cut at its invocation
    forward   many questions behind a document's frozen KV, in one forward
    student   the adapter: its first weights, its state on disk, its export
    training  the teacher's answers, and the training steps
    judge     compares the student with its teacher on held-out contexts
    distiller runs all of these; `evidence` has what it writes beside the adapter
    cli       the command
"""
