from __future__ import annotations

from tests.backends.python.models import floats


def test_a_tensor_reaches_the_target_and_comes_back_by_pointer(models):
    models.add(
        "target",
        """
        class TritonPythonModel:
            def execute(self, requests):
                [request] = requests
                self.made = tensor(request).as_numpy() * 2
                pointers = np.array([tensor(request).as_numpy().ctypes.data, self.made.ctypes.data])
                return [pb_utils.InferenceResponse(
                    [pb_utils.Tensor("Y", self.made), pb_utils.Tensor("P", pointers)])]
        """,
    )
    models.add(
        "caller",
        """
        class TritonPythonModel:
            def execute(self, requests):
                sent = np.arange(5, dtype=np.float32)
                response = ask("target", pb_utils.Tensor("X", sent), outputs=[]).exec()
                y, pointers = response.output_tensors()
                mine = [sent.ctypes.data, y.as_numpy().ctypes.data]
                return [answer(np.array([mine == pointers.as_numpy().tolist()])) for _ in requests]
        """,
    )
    assert models.infer("caller", floats(1)).array.all()
