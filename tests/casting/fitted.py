"""Backend files with fits that tests make up."""

from pathlib import Path

BF16 = """
[fits.matmul_bf16]
form = "matmul"
coefficients = { launch_s = 4e-6, compute_efficiency = 0.5, memory_efficiency = 0.5, overlap = 20 }
ranges = { m = [1, 4096], n = [32, 65536], k = [32, 65536] }
rows = 100
median_abs_error = 0.05
p90_abs_error = 0.15
origin = "calibrated"
source = "made up"
"""
GRID = """
[fits.matmul_bf16.correction]
axes = { m = [1, 100], n = [1, 1e6] }
values = [0.1, 0.1, 0.2, 0.2]
"""
TIMED = BF16.replace(
    "m = [1, 4096], n = [32, 65536], k = [32, 65536]", "m = [16, 4096], n = [1, 9e9], k = [2048, 6144]"
)
MEASURED = """
[fits.matmul_bf16.measured]
axes = { m = [16, 256, 4096], k = [2048, 6144] }
seconds = [1e-5, 2e-5, 2e-5, 4e-5, 1e-4, 3e-4]
"""


def fitted_backend(folder: Path, fits: str = BF16, *, extends: str = "nvidia", name: str = "fitted.toml") -> str:
    """A file with these fits on h200_sxm; returns its path."""
    path = folder / name
    head = f'name = "fitted"\ndescription = "made up"\nextends = "{extends}"\ndevice = "h200_sxm"\n'
    path.write_text(head + fits)
    return str(path)
