"""Load KV that another model has computed, and recompute one block of layers, inside SGLang.

    engine     the parts of SGLang that this package uses; no other folder imports SGLang
    start      settings, refused configurations, and this server's model
    adapters   LoRA: the models that one server answers as
    store      E of each slot, an index of the KV on the device, and copies to host memory
    hicache    a tier of the cache in the storage backends of SGLang's HiCache
    request    the life of one request; read this folder first
    guard      compares reused answers with exact ones, and stops plans that drift

Each folder imports only folders above it. SGLang calls `plugin` when a process starts, and `linker`
in every scheduler step. The two connect the folders. `cli`, `demo`, `fleet`, `verify` are commands.

docs/glossary.md explains most words, such as E: the values that enter a layer. Some more words:

    rank       one process of a server with tensor parallelism: it has a part of each layer
    slot       place of one token's KV in SGLang's KV pool on the device
    staging    host memory that a fetch fills
    tier       a place that stores pages: host memory, disk, or a backend of HiCache
    head       first pages that many prompts share
    shadow     comparison of an answer with an exact prefill
    line       models of which each was trained from the one before; later models inherit a plan
"""

__version__ = "0.1.0"
