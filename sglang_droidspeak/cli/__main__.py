"""Run as `python -m sglang_droidspeak.cli`."""

from sglang_droidspeak.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
