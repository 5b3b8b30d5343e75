import pytest

from genserve.errors import InferenceError
from genserve.server.kserve.triton_parsing import forwarded_headers

HEADERS = (("my_header_1", "a"), ("MY_HEADER_2", "b"), ("other", "c"))


@pytest.mark.parametrize(
    ("pattern", "names"),
    [("", []), ("MY_HEADER.*", ["my_header_1", "MY_HEADER_2"]), ("(?-i)MY_HEADER.*", ["MY_HEADER_2"])],
    ids=["none", "any-case", "case-sensitive"],
)
def test_headers_with_a_matching_name_are_forwarded(pattern, names):
    assert list(forwarded_headers(HEADERS, pattern)) == names


@pytest.mark.parametrize("name", ["sequence_id", "timeout", "headers", "triton_final_response"])
def test_a_header_cannot_pass_for_a_parameter_of_the_protocol(name):
    message = f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
    with pytest.raises(InferenceError, match=message):
        forwarded_headers([(name, "1")], ".*")
    assert forwarded_headers([(name, "1")], "my_.*") == {}
