"""Version: of genserve; the server and the client report it too."""

__all__ = ["__version__"]

__version__ = "0.1.0"
