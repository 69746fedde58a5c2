"""Classes of LitServe, pushed as they are: the library's own classes, and requests as its server takes them."""

from __future__ import annotations

from pathlib import Path

from tests.kit.stack import Stack

#: the first example of LitServe's own page
SIMPLE = """
import litserve as ls

class SimpleLitAPI(ls.LitAPI):
    def setup(self, device):
        self.model1 = lambda x: x**2
        self.model2 = lambda x: x**3

    def decode_request(self, request):
        return request["input"]

    def predict(self, x):
        return {"output": self.model1(x) + self.model2(x)}

    def encode_response(self, output):
        return {"output": output["output"]}

if __name__ == "__main__":
    ls.LitServer(SimpleLitAPI(), accelerator="auto").run(port=8000)
"""
BATCHED = """
import litserve as ls

class Upper(ls.LitAPI):
    def __init__(self):
        super().__init__(max_batch_size=4)

    def setup(self, device):
        self.seen = []

    def decode_request(self, request):
        return request["text"]

    def predict(self, texts):
        assert isinstance(texts, list)
        return [text.upper() for text in texts]

    def encode_response(self, output):
        return {"text": output}
"""


def answers(stack: Stack, name: str, *requests: object) -> object:
    body = {"instances": [{"request": one} for one in requests]}
    return stack.http.post(f"/v1/models/{name}:predict", json=body).raise_for_status().json()["predictions"]


def push(stack: Stack, tmp_path: Path, name: str, source: str) -> None:
    (tmp_path / "service.py").write_text(source)
    stack.push(name, tmp_path / "service.py")


def test_the_example_of_its_page_answers_as_there(stack: Stack, tmp_path: Path) -> None:
    push(stack, tmp_path, "simple", SIMPLE)
    assert answers(stack, "simple", {"input": 4.0}, {"input": 3}) == [{"output": 80.0}, {"output": 36}]


def test_a_class_that_batches_gets_the_requests_of_a_run_together(stack: Stack, tmp_path: Path) -> None:
    push(stack, tmp_path, "upper", BATCHED)
    assert answers(stack, "upper", {"text": "ab"}, {"text": "c"}) == [{"text": "AB"}, {"text": "C"}]
