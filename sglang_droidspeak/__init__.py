"""The SGLang side: capture E, match across models, load, recompute one block, decode.

    plugin → site → linker ┬→ waiting → job → loader, forward (partial prefill)
                           └→ capture → offloader

`plugin` is what SGLang's entry point calls. Everything SGLang-specific is imported through
`engine`, so that an unsupported version is refused in one place.
"""

__version__ = "0.1.0"
