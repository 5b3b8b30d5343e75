"""Entry point of `python -m genserve`."""

from genserve.cli.main import main

if __name__ == "__main__":
    main()
