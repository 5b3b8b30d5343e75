"""Entry point of `genserve` and of `python -m genserve`."""

from __future__ import annotations


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback, even while modules are being imported."""
    try:
        from genserve.cli.main import main as run

        run()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
