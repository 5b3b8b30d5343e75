"""Version: of genserve; the server and the client report it too."""


__version__ = "0.1.0"
