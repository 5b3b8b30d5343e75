"""Stands in for Triton's repeat backend: the elements of IN, each after its DELAY, as responses."""

import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    """Sends on a thread and returns after WAIT; if not decoupled, only the last response is sent."""

    def initialize(self, args):
        """Read the policy and `output_num_elements`."""
        config = json.loads(args["model_config"])
        self.decoupled = config.get("model_transaction_policy", {}).get("decoupled", False)
        count = config.get("parameters", {}).get("output_num_elements", {"string_value": "1"})
        self.num_elements = int(count["string_value"])
        self.threads = []

    def execute(self, requests):
        """Begin to send, after the milliseconds that the inputs say."""
        return [self.answer(request) for request in requests] if not self.decoupled else self.stream(requests)

    def stream(self, requests):
        """Send the responses of each request on a thread of its own."""
        for request in requests:
            arguments = (request.get_response_sender(), self.pairs(request))
            thread = threading.Thread(target=self.send, args=arguments)
            thread.start()
            self.threads.append(thread)
            time.sleep(pb_utils.get_input_tensor_by_name(request, "WAIT").as_numpy()[0] / 1000)

    def pairs(self, request):
        """Return the elements of IN and DELAY."""
        names = ("IN", "DELAY")
        values, delays = (pb_utils.get_input_tensor_by_name(request, name).as_numpy() for name in names)
        if values.shape != delays.shape:
            shapes = f"got {list(values.shape)} and {list(delays.shape)}"
            raise pb_utils.TritonModelException(f"expected IN and DELAY shape to match, {shapes}")
        return list(zip(values.tolist(), delays.tolist(), strict=True))

    def send(self, sender, pairs):
        """Send a response for each element, and the end."""
        for index, (value, delay) in enumerate(pairs):
            time.sleep(delay / 1000)
            sender.send(self.response(index, value))
        sender.send(flags=_FINAL)

    def answer(self, request):
        """Return the response for the last element."""
        pairs = self.pairs(request)
        time.sleep(sum(delay for _, delay in pairs) / 1000)
        return self.response(len(pairs) - 1, pairs[-1][0])

    def response(self, index, value):
        """Return the response of one element."""
        out = np.full(self.num_elements, value, np.int32)
        idx = np.array([index], np.uint32)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUT", out), pb_utils.Tensor("IDX", idx)])

    def finalize(self):
        """Wait until all responses are sent."""
        for thread in self.threads:
            thread.join()
