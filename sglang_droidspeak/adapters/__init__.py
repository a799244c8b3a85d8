"""LoRA: the models of one server, and adapters that act only from some token on."""
