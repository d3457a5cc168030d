# The template of a patch's test; `nox -s new` copies it without this line.
"""What a user does, and the result that the user gets.

The fixtures of tests/conftest.py and the functions of tests/support.py provide small models.
"""

from __future__ import annotations

import pytest

WEIGHTS = {"layer.weight": 1, "layer.bias": 2, "other.weight": 3}


# Without the patch, the test must fail with an exception that matches the second argument: the
# message that users see.  If the bug raises no exception, match the message of an assertion.
@pytest.mark.regression("patch_name", r"KeyError: 'layer\.layer\.weight'")
def test_a_view_is_what_it_says():
    from accelerate.utils.offload import PrefixedDataset

    assert dict(PrefixedDataset(WEIGHTS, "layer.")) == {"weight": 1, "bias": 2}


@pytest.mark.regression("patch_name", r"counts other modules")
def test_length():
    from accelerate.utils.offload import PrefixedDataset

    assert len(PrefixedDataset(WEIGHTS, "layer.")) == 2, "counts other modules"


def test_what_worked_works_as_before():
    from accelerate.utils.offload import PrefixedDataset

    view = PrefixedDataset(WEIGHTS, "layer.")
    assert (view["weight"], view["bias"]) == (1, 2)
    with pytest.raises(KeyError):
        view["layer.weight"]
    assert dict(PrefixedDataset(WEIGHTS, "")) == WEIGHTS
