"""Which tokens a head may draft, and their rows."""

from __future__ import annotations

import numpy as np
import pytest

from pyluce.options import DEFAULT_MODEL
from pyluce.weights import open_model
from pyluce.weights.draft_vocabulary import compact_ids, pays
from pyluce.weights.tensors import OUTPUT


def test_required_tokens_first_then_the_lowest() -> None:
    metadata = {
        "tokenizer.ggml.eos_token_id": 90,
        "tokenizer.ggml.bos_token_id": 91,
        "tokenizer.ggml.pad_token_id": 500,
    }
    assert compact_ids(metadata, 100, 5).tolist() == [0, 1, 2, 90, 91]
    assert compact_ids({}, 100, 3).tolist() == [0, 1, 2]
    assert compact_ids(metadata, 100, 1).tolist() == [90]


def test_where_it_pays() -> None:
    assert pays(248_320, 64_000)
    assert not pays(127_999, 64_000)
    assert not pays(248_320, 0)


def test_rows_of_the_model_that_ships() -> None:
    with open_model(DEFAULT_MODEL) as model:
        assert model.draft_ids is None
        model.attach_draft(vocabulary=1000)
        ids = model.draft_ids
        assert ids is not None
        types = model.metadata["tokenizer.ggml.token_type"].numbers()  # type: ignore[union-attr]
        special = np.flatnonzero(np.isin(types, (3, 4)))
        assert set(special) <= set(ids)
        assert special.min() > 1000
        assert len(ids) == 1000
        assert (np.diff(ids) > 0).all()
        info = model.tensors[OUTPUT]
        rows = model.read(info).reshape(info.ne[1], -1)
        assert (model.gather(info, ids) == rows[ids]).all()


@pytest.mark.parametrize("vocabulary", [0, 2049])
def test_a_small_vocabulary_stays_whole(vocabulary: int) -> None:
    with open_model(DEFAULT_MODEL) as model:
        model.attach_draft(vocabulary=vocabulary)
        assert model.draft_ids is None
