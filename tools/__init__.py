"""Programs that make files of this repository again; no part of the package."""
