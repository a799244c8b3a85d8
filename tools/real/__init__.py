"""A real model and three skills of it: SmolLM2-135M-Instruct and LoRA adapters on real text.

    base       gets the model by its package and converts it
    packages   reads records of Debian packages: examples/real/packages.jsonl
    questions  what is asked about them: three skills, in the form of LongBench v1
    train      trains an adapter with peft and transformers
    check      judges an adapter's answers

`examples/real/README.md` says what came out.
"""
