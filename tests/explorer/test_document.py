"""The JSON document of the mask explorer."""

import json

from longspan.explorer.document import document
from tests.explorer import example


def test_the_example_document_is_current():
    stored = json.loads(example.PATH.read_text("utf-8"))
    assert stored == json.loads(json.dumps(example.made())), "run `python -m tests.explorer.example`"
    assert set(stored) == set(document(example.mask_of()[0], 96))
