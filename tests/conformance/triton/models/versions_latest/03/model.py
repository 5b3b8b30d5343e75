class TritonPythonModel:
    """A folder with a leading zero is no version."""

    def initialize(self, args):
        raise ValueError("03 is not a version")

    def execute(self, requests):
        return []
