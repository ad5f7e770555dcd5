"""`attn-export probe`."""

from __future__ import annotations

from attn_export.commands.options import STDOUT, json_option, option, quiet_option, with_help
from attn_export.commands.output import write_file
from attn_export.errors import RuntimeFailure


@with_help("Find causes", "probe openvino", "probe pytorch --json -")
@option("runtime")
@json_option("Write it as JSON; - for stdout.")
@quiet_option
def probe_command(runtime: str, json_file: str | None, quiet: bool) -> int:
    """Find how a runtime interprets attention, compared with ONNX and PyTorch.

    Runs small cases, each of which tells interpretations apart: causal alignment, windows, shared
    heads, masked rows, softcap, NaN, empty axes, precision, small numbers. A crash, a hang and a
    refusal are results too. Exit code 5 if the runtime cannot run here, or no case gives an output.
    """
    from attn_export.parts.probe.probe_report import print_probe, probe_to_json
    from attn_export.parts.probe.run_probes import probe
    from attn_export.report.progress import progress

    with progress(quiet=quiet) as bar:
        fingerprint = probe(runtime, progress=bar)
    if json_file:
        write_file(json_file, probe_to_json(fingerprint))
    if json_file != STDOUT and not quiet:
        from rich.console import Console

        print_probe(fingerprint, Console())
    return 0 if fingerprint.ran else RuntimeFailure.exit_code
