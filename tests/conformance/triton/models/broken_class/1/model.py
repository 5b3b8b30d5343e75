class PythonModel:
    def execute(self, requests):
        return []
