"""The SGLang side: capture E, match across models, load, recompute one block, decode.

    engine     what SGLang is to us: the only folder that names it
    start      settings, what is refused, what this server is
    adapters   LoRA: which models one server answers as
    store      E by KV slot, what the pool has, the way out into the cache
    hicache    what is stored, in the backends of SGLang's HiCache, too
    request    what one request goes through: begin there
    guard      what approximate KV does to answers, and plans that drift

Each folder knows only those above it. `plugin` is what SGLang's entry point calls, and `linker`
what its radix cache drives; they put the rest together. `cli`, `demo` and `fleet` are commands.
"""

__version__ = "0.1.0"
