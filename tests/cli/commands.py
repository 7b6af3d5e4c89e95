"""Command lines that several tests share."""

from castoff.cli import main

MODEL, DEVICE = "zai-org/GLM-5.2", "ATLAS_800_A3_752T_128G_DIE"
CAST = ["cast", MODEL, "--device", DEVICE]
TP16 = ["--num-devices", "16", "--tp-size", "16", "--ep-size", "16"]
# The command of the published design, with the program's name exchanged.
PUBLISHED = [
    *("cast", "zai-org/GLM-5.2", "--device", "ATLAS_800_A3_752T_128G_DIE", "--num-devices", "16", "--tp-size", "16"),
    *("--dp-size", "1", "--ep-size", "16", "--context-length", "61000", "--query-length", "4096"),
    *("--num-queries", "1", "--num-mtp-tokens", "3", "--compile", "--quantize-linear-action", "W4A8_STATIC"),
    "--dump-input-shapes",
]


def exit_status(*arguments: str) -> int:
    """Run castoff in this process; help pages end by returning, never by SystemExit."""
    return main(list(arguments))
