"""LoRA: the models of one server, and adapters that act from some token on."""
