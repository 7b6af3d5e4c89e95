"""All forms, by the names that backend files have for them."""

from __future__ import annotations

from collections.abc import Mapping

from castoff.casting.forms.amounts import AMOUNTS
from castoff.casting.forms.form import Form
from castoff.casting.forms.matmul import MATMUL

FORMS: Mapping[str, Form] = {"matmul": MATMUL, "amounts": AMOUNTS}
