"""Compiling: with numba and without it, on disk, and not before it is needed."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from castoff.policy.compiled import compiled
from castoff.policy.direct import planner
from castoff.policy.over_steps import _direct_counter

PLAN = """
import sys
import numpy as np
from castoff.policy.arrays import PoolState, Selection
from castoff.policy.direct import plan_direct

def state():
    pool, sets = (1, 3, 4), (1, 3)
    return PoolState(*(np.full(pool, -1, np.int32) for _ in "tu"), *(np.zeros(sets, np.int32) for _ in "hm"))

def plan(pools):
    topk = np.arange(40, dtype=np.int32).reshape(2, 20)
    selection = Selection(topk, np.zeros(2, np.int64), np.array([41]), np.array([39]), np.array([0]))
    return plan_direct("clock", selection, np.array([37]), pools, ring_tokens=4, staging_rows=40)
"""


def python(code: str, **environment: str) -> str:
    """Standard output of a fresh interpreter."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def add(a: int, b: int) -> int:
    return a + b


def total(values: np.ndarray) -> int:
    result = 0
    for value in values:
        result = add(result, value)
    return int(result)


def test_functions_call_plain_functions() -> None:
    values = np.arange(10)
    assert compiled(total)(values) == total(values) == 45
    assert compiled(total) is compiled(total), "nothing is compiled twice"


@pytest.mark.architecture
def test_numba_is_imported_when_a_plan_is_made() -> None:
    pytest.importorskip("numba")
    loaded = "print('numba.core' in sys.modules, 'torch' in sys.modules)"
    assert python(f"{PLAN}\n{loaded}\nplan(state())\n{loaded}").split() == ["False", "False", "True", "False"]


def test_without_numba_plans_are_the_same() -> None:
    show = "pools = state()\nprint([array.tolist() for array in (*plan(pools), *pools)])"
    hidden = "import sys\nsys.modules['numba'] = None\n"
    assert python(hidden + PLAN + show) == python(PLAN + show)


RUN = """
from castoff.policy.compiled import compiled
from caller import twice
function = compiled(twice)
print(function(3), sum(function.kept.stats.cache_hits.values()))
"""


def test_machine_code_is_kept_until_the_source_of_a_callee_changes(tmp_path: Path) -> None:
    pytest.importorskip("numba")
    (tmp_path / "caller.py").write_text("from callee import once\n\ndef twice(x):\n    return once(once(x))\n")
    callee = tmp_path / "callee.py"
    where = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path]), "NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    callee.write_text("def once(x):\n    return x + 1\n")
    assert python(RUN, **where).split() == ["5", "0"]
    assert python(RUN, **where).split() == ["5", "1"]
    callee.write_text("def once(x):\n    return x + 10\n")
    assert python(RUN, **where).split() == ["23", "0"]


def test_functions_that_close_over_different_ones_are_kept_apart() -> None:
    """Processes that compile them at once would write one index, and could load each other's code."""
    pytest.importorskip("numba")
    kept = [compiled(make(policy)) for make in (planner, _direct_counter) for policy in ("fifo", "lru", "clock")]
    assert len({function.kept.py_func.__qualname__ for function in kept}) == 6  # type: ignore[attr-defined]


def test_a_disk_that_takes_nothing_does_not_end_a_plan() -> None:
    pytest.importorskip("numba")
    code = """
import numba.core.caching as caching
import numpy as np
def full(*_):
    raise OSError(28, "No space left on device")
caching.IndexDataCacheFile.save = full
from castoff.policy.compiled import compiled
from tests.policy.test_compiled import total
print(compiled(total)(np.arange(10)), compiled(total)(np.arange(11)))
"""
    assert python(code) == "45 55\n"


def test_a_numba_that_cannot_be_imported_is_told_of_and_done_without(tmp_path: Path) -> None:
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text("raise ImportError('Numba needs NumPy 2.3 or less')")
    code = """
import warnings
import numpy as np
from castoff.policy.compiled import compiled
from tests.policy.test_compiled import total
with warnings.catch_warnings(record=True) as told:
    warnings.simplefilter("always")
    print(compiled(total)(np.arange(10)), [str(item.message) for item in told])
"""
    out = python(code, PYTHONPATH=os.pathsep.join([str(tmp_path), *sys.path]))
    assert out.startswith("45 ")
    assert out.count("Numba needs NumPy") == 1


def test_without_a_folder_to_write_nothing_is_kept() -> None:
    pytest.importorskip("numba")
    code = """
import numba.core.caching as caching
import numpy as np
caching.CacheImpl._locator_classes = []
from castoff.policy.compiled import compiled
from tests.policy.test_compiled import total
print(compiled(total)(np.arange(10)))
"""
    assert python(code) == "45\n"
