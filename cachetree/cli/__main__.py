"""Run the command `cachetree` as `python -m cachetree.cli`."""

from __future__ import annotations

from cachetree.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
