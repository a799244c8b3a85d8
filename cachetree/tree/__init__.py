"""What is cached, by prefix: entries of all models and places, and who keeps them."""
