"""What the client refuses before anything is sent."""

from __future__ import annotations

from typing import Any

import pytest

from perf.client import tensor
from runtime.errors import RequestError


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("sampling_param_seed", -1, "sampling_param_seed: got -1, expected 0 to 18446744073709551615"),
        ("sampling_param_seed", 1 << 64, "sampling_param_seed: got 18446744073709551616"),
        ("sampling_param_max_tokens", 99_999_999_999, "sampling_param_max_tokens: got 99999999999"),
        ("protect", [(0, 1), (2, 1 << 31)], "protect: got 2147483648"),
        ("text_input", "a terminal's stray byte \udcff", "text_input: got text with undecodable bytes"),
    ],
)
def test_values_that_do_not_fit_are_refused(name: str, value: Any, part: str) -> None:
    with pytest.raises(RequestError, match=part):
        tensor(name, value)


def test_values_that_fit_keep_their_shape() -> None:
    assert tensor("protect", ((0, 1), (2, 3))).shape() == [2, 2]
    assert tensor("sampling_param_seed", (1 << 64) - 1).shape() == [1]
