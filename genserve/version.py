"""Version: of the package, the server's answers and the client's requests."""

__all__ = ["__version__"]

__version__ = "0.1.0"
