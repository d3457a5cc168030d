# The template of a patch's test, which `nox -s new` copies without this line.
"""What users do, and what they get.

Small models come from the fixtures of tests/conftest.py and the functions of tests/support.py.
"""

from __future__ import annotations

import pytest

WEIGHTS = {"layer.weight": 1, "layer.bias": 2, "other.weight": 3}


# Without the patch the test must fail with an exception that matches the second argument: the
# users' own message.  A bug without an exception shows as a failed assertion; match its message.
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
