"""LoRA: the models of one server, factors, low-rank refresh, activated LoRA."""
