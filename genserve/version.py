"""Version: the version of genserve, which the server and the client report too."""


__version__ = "0.1.0"
