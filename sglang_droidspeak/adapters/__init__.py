"""LoRA: the models of one server, their factors, and adapters that act from some token on."""
