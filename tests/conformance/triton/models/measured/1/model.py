import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        Family = pb_utils.MetricFamily  # not there while the config is completed
        counters = Family(name="conformance_requests", description="requests of it", kind=Family.COUNTER)
        gauges = Family(name="conformance_level", description="the last level", kind=Family.GAUGE)
        histograms = Family(name="conformance_sizes", description="sizes", kind=Family.HISTOGRAM)
        self.families = (counters, gauges, histograms)
        self.counter = counters.Metric(labels={"model": "measured", "kind": "all"})
        self.gauge = gauges.Metric(labels={"model": "measured"})
        self.histogram = histograms.Metric(labels={"model": "measured"}, buckets=[1.0, 2.0])

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        value = float(pb_utils.get_input_tensor_by_name(request, "VALUE").as_numpy()[0])
        word = pb_utils.get_input_tensor_by_name(request, "MODE").as_numpy()[0].decode()
        actions = {
            "increment": lambda: (self.counter.increment(value), self.counter.value()),
            "set": lambda: (self.gauge.set(value), self.gauge.value()),
            "lower": lambda: (self.gauge.increment(-value), self.gauge.value()),
            "observe": lambda: self.histogram.observe(value),
            "again": lambda: self.families[1].Metric(labels={"model": "measured"}).value(),
            "no_buckets": lambda: self.families[2].Metric(labels={"model": "other"}),
        }
        try:
            said = repr(actions[word]())
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
        return pb_utils.InferenceResponse([pb_utils.Tensor("SAID", np.array([said], np.object_))])
