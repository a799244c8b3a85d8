"""Programs that generate files of this repository. The package does not need them."""
