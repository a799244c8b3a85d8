"""Load KV that another model has computed, and recompute one block of layers, inside SGLang.

    engine     the parts of SGLang that this package uses; no other folder names SGLang
    start      settings, refused configurations, and this server's model
    adapters   LoRA: the models that one server answers as
    store      E by KV slot, an index of the KV pool, and copies to the cache
    hicache    a tier of the cache in the storage backends of SGLang's HiCache
    request    the life of one request; read this folder first
    guard      compares reused answers with exact ones, and stops plans that drift

Each folder imports only folders above it. SGLang calls `plugin` when a process starts, and `linker`
in every step. These two connect the folders. `cli`, `demo` and `fleet` are commands.

docs/glossary.md explains the words of all docstrings, such as E (the values that enter a layer).
"""

__version__ = "0.1.0"
